"""Speculation: guessing the next tokens of a request, so that one step can check several of them.

A token is a function of (seed, position, tokens before it). A guess is right if the draw without speculation gives the
same token, so speculation changes only the time. A guess that a step checks is called a draft.

config          SpeculativeConfig: settings under vLLM's names; make_drafter
drafter         Drafter: the interface that the scheduler asks for guesses
ngram, suffix   the drafters that search texts, with token_index
acceptance      the share of drafts that are accepted, by position
length          how many drafts a request gets in a step, by acceptance and by their cost (step_cost)
stats           counters of drafts and accepted drafts
"""

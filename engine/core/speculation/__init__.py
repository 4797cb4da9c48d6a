"""Speculation: guessing the next tokens of a request, so that one step can check several of them.

A token is a function of (seed, position, tokens before it). So a guess is right where the undisturbed draw gives the
same token, and speculation changes nothing but the time. Guesses are called drafts once they are part of a step.

config          SpeculativeConfig: settings under vLLM's names; make_drafter
drafter         Drafter: what the scheduler asks for guesses
ngram, suffix   the drafters; they search texts with token_index
length          how many drafts a request gets in a step, by how many were accepted lately and by what they cost
stats           what was drafted and accepted
"""

"""The engine's bookkeeping in plain Python: requests, KV blocks, the scheduler, and the contracts between the parts.

Nothing below this package imports torch or numpy, so that routers, simulators and tests can run real schedulers
by the thousand. Structures that cross process borders are `msgspec` structs.

engine       EngineCore: requests in, steps planned, outputs out
messages, sampling, stages                    between an engine and who asks
step, lockstep                                ... and its runner, and the ranks that step with it
connector, tiers, layout, grammar             ... and what moves its blocks, keeps them, or knows grammars
prefix, block_log                             what blocks are called, and where which are
requests/ <── kv/ <── scheduling/             the parts, each of which sees those to its left only
speculation/                                  guesses of what requests draw next
"""

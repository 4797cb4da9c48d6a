"""The engine's bookkeeping in plain Python: requests, KV blocks, the scheduler, and the contracts between the parts.

Nothing below this package imports torch or numpy, so that routers, simulators and tests can run real schedulers
by the thousand. Structures that cross process borders are `msgspec` structs.

engine                              EngineCore: takes requests, plans steps, returns outputs
messages, sampling, stages          the contract with gateways and `LLM`, which send the requests
step, lockstep                      ... with the runner, and with data-parallel ranks that step together
connector, tiers, layout, grammar   ... with KV transfers, tiers, the memory that holds KV, and grammar libraries
prefix, block_log                   hashes of blocks, and the log of which blocks are cached where
requests/ <── kv/ <── scheduling/   the parts; each knows only those to its left
speculation/                        guesses of a request's next tokens
"""

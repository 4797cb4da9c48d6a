"""The engine's bookkeeping in plain Python: requests, KV blocks, the scheduler, and the contracts between the parts.

Nothing below this package imports torch or numpy, so that routers, simulators and tests can run real schedulers
by the thousand. Structures that cross process borders are `msgspec` structs.
"""

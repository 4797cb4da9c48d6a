"""Moving KV blocks between engines: a ticket, a lease, a read, a commit.

From the top down; each part imports only parts below it:

    bench/       how fast, and where the time goes, beside raw NIXL (`baton bench kv`)
    staging/     hand-offs by way of the host's memory, for blocks that cannot be registered
    connector    the engine's `KVConnector`: a transfer thread around ...
    handoff/     ... one engine's side of all hand-offs: peers, reads, messages, digest checks
    tiers/       blocks in the host's memory and on disks
    group/       orders and reports between the ranks of one tensor-parallel group, for reads and copies
    digests, descriptors, block_copies, host_memory    digests and byte ranges of blocks; copies to the host's memory
    transports/  reads of peers' memory: CUDA IPC, NIXL, UCX; files
    net/         channels between engines: ZeroMQ with CURVE
    protocol/    messages, tickets, and the state machines of both sides: no threads, no sockets

The only package that imports NIXL and UCXX.
"""

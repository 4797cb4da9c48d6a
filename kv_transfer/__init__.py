"""Move KV blocks between engines: a ticket, a lease, a read, a commit.

From the top down; each part imports only parts below it:

    bench/         `baton bench kv`: the time and the stages of hand-offs, compared with raw NIXL
    staging/       hand-offs through host memory, for blocks that a transport cannot register
    connector      the engine's `KVConnector`: a transfer thread around ...
    handoff/       ... one engine's side of all hand-offs: peers, reads, messages, digest checks
    tiers/         blocks in host memory and on disks
    group/         orders and reports between the ranks of one tensor-parallel group, for reads and copies
    descriptors    from block ids to byte ranges
    block_copies   copies between the engine's blocks and slots in the host's memory
    transports/    reads of peers' memory (CUDA IPC, NIXL, UCX) and of files
    channel        messages between engines: ZeroMQ with CURVE
    host_memory    such slots, pinned if they are for a GPU
    protocol/      messages, tickets, and the state machines of both sides: no threads, no sockets

This is the only package that imports NIXL and UCXX.
"""

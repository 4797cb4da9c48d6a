"""Moving KV blocks between engines: a ticket, a lease, a read, a commit.

    connector    the engine's `KVConnector`: a transfer thread around ...
    protocol/    ... one engine's side of all hand-offs (`handoff`), without threads, wired from
      leases       what a prefill engine keeps for its readers
      receives     what a decode engine fills, and when that counts
      peers        whose memory can be read
      messages     what engines say to each other; the ticket
    ranks/
      pulls        reads on their way, by
      crew         all ranks of the engine's group, each of which reads its own KV heads (`rank_reader`)
      team         the same for copies of their shares
    network/     how engines talk: ZMQ with CURVE, whose key all of a cluster have; who is silent is gone
    transports/  how memory is read (NIXL, UCX, files, and a fake with faults); `affinity` is where the thread runs
    copies/      between blocks and the host's memory; the host buffer
    tiers/       blocks in the host's memory and on disks
    bench/       how fast, and where the time goes, beside raw NIXL (`baton bench kv`)

`descriptors` are the byte ranges of blocks, `digests` the proof of what they hold, `codec` the bytes of all messages,
`threads` own what they open, `pacing` is how soon they look again.
The only package that imports NIXL and UCXX.
"""

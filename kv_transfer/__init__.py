"""Moving KV blocks between engines: a ticket, a lease, a read, a commit.

    connector    the engine's `KVConnector`: a transfer thread around ...
    handoff      ... one engine's side of all hand-offs, without threads, wired from
      leases       what a prefill engine keeps for its readers
      receives     what a decode engine fills, and when that counts
      peers        whose memory can be read
      pulls        reads on their way, by
      crew           all ranks of the engine's group, each of which reads its own KV heads
        rank_reader    one of them: `descriptors` are the byte ranges that its heads of blocks are
    crew_member  the thread that does so on ranks other than 0; `crew_messages` are its orders
    messages     what engines say to each other; the ticket
    channel      how they say it (ZMQ with CURVE); `curve` holds the cluster's key
    transports   how memory is read (NIXL, UCX, and a fake with faults); `affinity` is where the thread runs that does

The only package that imports NIXL and UCXX.
"""

"""One engine's side of all its hand-offs: the state machines of `protocol/`, wired to peers, reads and messages.

coordinator ──> effects ──> message_router, peers, reads, digest_check

It has no threads and never sleeps: `TransferConnector` runs it in a thread, tests run it in virtual time.
"""

"""The protocol of hand-offs: messages and the state machines of both sides, without threads, sockets or KV memory."""

"""The protocol of hand-offs: messages, and the state machines of both sides. No threads, no sockets, no memory here."""

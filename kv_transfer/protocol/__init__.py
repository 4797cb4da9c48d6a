"""What a hand-off is.

Messages and the state machines of both sides. No threads, no sockets and no memory here.
"""

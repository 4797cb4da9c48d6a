"""What a hand-off is.

Messages, the state machines of both sides, and the one class that wires them. No threads and no sockets here.
"""

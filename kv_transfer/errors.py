"""The errors of this package."""

from __future__ import annotations


class TransferError(Exception):
    """Base of all errors of KV transfers."""


class MalformedMessage(TransferError):
    """Bytes from another process are not a valid message or ticket of this version."""


class TransportError(TransferError):
    """A transport or a channel failed: it could not register memory, use an address, reach a peer, or start a read."""


class NotRegistrable(TransportError):
    """The transport cannot register the memory that it was given; host memory may still work."""


class RankLost(TransferError):
    """Another rank of our group has ended or does not answer, so the whole group must end."""


class TransferThreadDied(TransferError):
    """The transfer thread died of a bug in Baton (its cause is chained): replace the process."""

"""The errors of this package."""

from __future__ import annotations


class TransferError(Exception):
    """Base of all errors of KV transfers."""


class MalformedMessage(TransferError):
    """Bytes from another process are no message, or no ticket, of this version."""


class TransportError(TransferError):
    """A transport or a channel refused: memory that cannot be registered, an address, a peer, a read."""


class NotRegistrable(TransportError):
    """The transport cannot register the memory that it was given; it may be able to register the host's."""


class RankLost(TransferError):
    """Another rank of our group ended, or does not answer: the group is over."""


class TransferThreadDied(TransferError):
    """The transfer thread met an error of our own making (its cause is chained): the process should be replaced."""

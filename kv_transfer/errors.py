"""Everything this package raises."""

from __future__ import annotations


class TransferError(Exception):
    """Base of all errors of KV transfers."""


class MalformedMessage(TransferError):
    """Bytes from another process are no message, or no ticket, of this version."""


class TransportError(TransferError):
    """The transport refused: memory that cannot be registered, a peer that cannot be reached, a read that failed."""


class NotRegistrable(TransportError):
    """The transport cannot register the memory it was given; memory of the host may do."""


class RankLost(TransferError):
    """Another rank of our group ended, or does not answer: what it was to read will not come, and the group is over."""


class TransferThreadDied(TransferError):
    """The transfer thread met an error of our own making (its cause is chained): the process should be replaced."""

"""The ticket with which a hand-off begins: what the holder offers, and where its blocks are.

It comes from another process through a gateway. Whatever its bytes hold, decoding returns a valid ticket or raises
`MalformedMessage`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from .. import codec
from ..codec import Id, Name, Reason
from ..errors import MalformedMessage
from .block_runs import BlockNumbers, BlockRuns, decode_runs
from .messages import DigestMode, LeaseKey, Seconds

TICKET_VERSION = 2


class Ticket(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The offer of a prompt's blocks, as it travels through the gateway. It holds for `lease_s` from when it is sent.

    Of a growing offer only the leading `num_ready` blocks are written when the ticket is sent. The `Granted` or `Grown`
    that announces the last block may replace the numbers of the last blocks.
    """

    version: int
    lease: LeaseKey
    kv_address: Name  # the holder's control socket
    fingerprint: Name
    transport: Name
    num_tokens: Annotated[int, Meta(ge=1, le=2**40)]
    lease_s: Seconds
    digest: DigestMode
    num_ready: Id
    runs: msgspec.Raw  # the blocks, in the form of `block_runs.py`
    refusal: Reason = ""  # why nothing is offered after all

    @functools.cached_property
    def _decoded_runs(self) -> BlockRuns:
        return decode_runs(self.runs)

    @property
    def num_blocks(self) -> int:
        return self._decoded_runs.num_blocks

    @property
    def block_ids(self) -> BlockNumbers:
        """A new array of the blocks, in order."""
        return self._decoded_runs.blocks

    def encode(self) -> bytes:
        return codec.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Ticket:
        """Decode a ticket. Raises `MalformedMessage` for bytes that are no ticket of this version."""
        ticket = _decode_ticket(data)
        if ticket.version != TICKET_VERSION:
            raise MalformedMessage(
                f"the ticket has version {ticket.version}, this engine reads version {TICKET_VERSION}"
            )
        if not ticket.num_blocks:
            raise MalformedMessage("the ticket offers no blocks")
        return ticket

    def check_block_size(self, block_size: int) -> None:
        """Raise `MalformedMessage` if the number of blocks does not fit the number of tokens."""
        needed = math.ceil(self.num_tokens / block_size)
        if needed != self.num_blocks:
            raise MalformedMessage(
                f"the ticket offers {self.num_blocks} blocks for {self.num_tokens} tokens;"
                f" blocks of {block_size} need {needed}"
            )


_decode_ticket: Callable[[bytes], Ticket] = codec.decoder(Ticket, "ticket")

"""What the ranks of one group say to each other about copies of their shares of blocks. Rank 0 orders, all carry out.

    rank 0                              another rank
      <------------------------------ TeamJoin
      CopyDown, CopyUp -------------->            between blocks and places of the host buffer
      <------------------------------ Copied
      OpenTiers --------------------->            and the files that belong to those of rank 0
      <------------------------------ Found       as often as it takes
      <------------------------------ Opened
      Carry ------------------------->            moves between blocks and tiers
      <------------------------------ Carried
      AreYouThere ------------------->            no answer: the system says whether it could be sent
      <------------------------------ GiveUp      I cannot go on, and why

Each order but the last is answered once, in order. Bytes come from other processes: whatever they hold, decoding
returns a valid message or raises `MalformedMessage`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.engine.core.prefix import HASH_BYTES

from .. import codec
from ..codec import Id, Name, Reason
from ..tiers.books import Loss, Move
from .rank_reader import MAX_RANKS

MAX_MOVES = 1024  # of one order: at most 70 KB
MAX_KEPT = 16384  # of one report: at most 500 KB

Pairs = Annotated[list[tuple[Id, Id]], Meta(max_length=MAX_MOVES)]  # a block, a place
Kept = tuple[Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)], Id]  # a block's name, its slot


class TeamJoin(msgspec.Struct, frozen=True, array_like=True, tag=0):
    rank: Annotated[int, Meta(ge=1, lt=MAX_RANKS)]
    fingerprint: Name  # of the layout


class Copied(msgspec.Struct, frozen=True, array_like=True, tag=1):
    pass


class Found(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Some of what the files have from earlier processes."""

    kept: Annotated[list[Kept], Meta(max_length=MAX_KEPT)]


class Opened(msgspec.Struct, frozen=True, array_like=True, tag=3):
    num_host_slots: Id
    num_disk_slots: Id
    disk_full: Reason = ""  # why there is no disk tier, where there should be one


class Carried(msgspec.Struct, frozen=True, array_like=True, tag=4):
    losses: Annotated[list[Loss | None], Meta(max_length=MAX_MOVES)]  # of each move
    disk_failed: bool


class GiveUp(msgspec.Struct, frozen=True, array_like=True, tag=5):
    reason: Reason


class CopyDown(msgspec.Struct, frozen=True, array_like=True, tag=0):
    pairs: Pairs


class CopyUp(msgspec.Struct, frozen=True, array_like=True, tag=1):
    pairs: Pairs


class OpenTiers(msgspec.Struct, frozen=True, array_like=True, tag=2):
    file_set: Annotated[str, Meta(max_length=64)]  # that rank 0's files are of; empty where there are none


class Carry(msgspec.Struct, frozen=True, array_like=True, tag=3):
    moves: Annotated[list[Move], Meta(max_length=MAX_MOVES)]


class AreYouThere(msgspec.Struct, frozen=True, array_like=True, tag=4):
    pass


TeamReport = TeamJoin | Copied | Found | Opened | Carried | GiveUp
TeamOrder = CopyDown | CopyUp | OpenTiers | Carry | AreYouThere

encode: Callable[[TeamReport | TeamOrder], bytes] = codec.encode
decode_report: Callable[[bytes], TeamReport] = codec.decoder(TeamReport, "report of a rank")
decode_order: Callable[[bytes], TeamOrder] = codec.decoder(TeamOrder, "order to a rank")

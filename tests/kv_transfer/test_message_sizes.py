"""No message outgrows the channel that carries it, however long the prompts and however large the groups.

The longest of each kind: names and reasons of all the characters that they may have, and 1M tokens in blocks of 16.
"""

from __future__ import annotations

from typing import get_args

import pytest

from baton.kv_transfer.codec import MAX_REASON_CHARS
from baton.kv_transfer.group import crew_messages, team_messages
from baton.kv_transfer.group.crew_messages import MAX_ORDER_BLOCKS, Order, Report
from baton.kv_transfer.group.rank_reader import MAX_RANKS, RankMemory
from baton.kv_transfer.group.team_messages import MAX_KEPT, MAX_MOVES, TeamOrder, TeamReport
from baton.kv_transfer.net.channel import MAX_MESSAGE_BYTES
from baton.kv_transfer.protocol import messages
from baton.kv_transfer.protocol.messages import (
    DIGEST_BLOCKS,
    MAX_DIGESTS_BYTES,
    MAX_LEASE_S,
    MAX_METADATA_BYTES,
    DigestMode,
    EngineKey,
    LeaseKey,
    Message,
    ReaderKey,
)
from baton.kv_transfer.tiers.books import Loss, Move
from baton.kv_transfer.transports import PeerState, ReadState

LONG_PROMPT = 2**20 // 16  # blocks
ID, NAME, REASON = 2**63 - 1, 4096 * "語", MAX_REASON_CHARS * "語"
BLOCK = 2**32  # of 16 tokens: more than any memory has
ENGINE = EngineKey(NAME, ID)
ENDS = LeaseKey(ENGINE, NAME, ID, ID), ReaderKey(ENGINE, ID)
METADATA, DIGESTS = bytes(MAX_METADATA_BYTES), bytes(MAX_DIGESTS_BYTES)
MOVE = Move(bytes(16), "pool", BLOCK, "disk", BLOCK)

LONGEST = [
    messages.Hello(ENGINE, ENGINE, NAME, NAME, DigestMode.VERIFY),
    messages.Welcome(ENGINE, ENGINE, METADATA),
    messages.Unwelcome(ENGINE, ENGINE, REASON),
    messages.Claim(*ENDS, ID),
    messages.Renew(*ENDS, ID),
    messages.Granted(*ENDS, ID, MAX_LEASE_S, ID),
    messages.Grown(*ENDS, ID),
    messages.Refused(*ENDS, REASON),
    messages.Withdrawn(*ENDS),
    messages.AskDigests(*ENDS, ID),
    messages.Digests(*ENDS, ID, DIGEST_BLOCKS, MAX_RANKS * (DIGESTS[: MAX_DIGESTS_BYTES // MAX_RANKS],)),
    messages.Finish(*ENDS),
    messages.Abort(*ENDS),
    crew_messages.Join(1, NAME, ID, NAME, RankMemory(0, 1, METADATA)),
    crew_messages.PeerReport(ID, PeerState.CONNECTING, REASON),
    crew_messages.ReadReport(ID, ReadState.RUNNING, REASON, True, ID, ID),
    crew_messages.CheckReport(ID, DIGESTS, REASON),
    crew_messages.Present(),
    crew_messages.Farewell(REASON),
    crew_messages.AddPeer(ID, METADATA),
    crew_messages.RemovePeer(ID),
    crew_messages.StartRead(ID, ID, MAX_ORDER_BLOCKS * [BLOCK], MAX_ORDER_BLOCKS * [BLOCK]),
    crew_messages.MakeDigests(ID, DIGEST_BLOCKS * [BLOCK]),
    crew_messages.Compare(ID, ID, DIGEST_BLOCKS * [BLOCK], MAX_RANKS * (DIGESTS[: MAX_DIGESTS_BYTES // MAX_RANKS],)),
    crew_messages.Attend(3600.0),
    team_messages.TeamJoin(1, NAME),
    team_messages.Copied(),
    team_messages.Found(MAX_KEPT * [(bytes(16), BLOCK)]),
    team_messages.Opened(ID, ID, REASON),
    team_messages.Carried(MAX_MOVES * [Loss.DISK_WRITE], True),
    team_messages.GiveUp(REASON),
    team_messages.CopyDown(MAX_MOVES * [(BLOCK, BLOCK)]),
    team_messages.CopyUp(MAX_MOVES * [(BLOCK, BLOCK)]),
    team_messages.OpenTiers(64 * "f"),
    team_messages.Carry(MAX_MOVES * [MOVE]),
    team_messages.AreYouThere(),
]


@pytest.mark.parametrize("message", LONGEST, ids=lambda message: type(message).__name__)
def test_the_longest_message_of_each_kind_goes_over_its_channel(message: object) -> None:
    data = messages.encode(message)  # type: ignore[arg-type]
    assert len(data) < MAX_MESSAGE_BYTES
    decoders = (messages.decode, crew_messages.decode_report, crew_messages.decode_order)
    decoders += (team_messages.decode_report, team_messages.decode_order)
    assert any(message == decode(data) for decode in decoders if not _is_refused(decode, data)), "it is one"


def test_every_kind_is_here() -> None:
    unions = (Message, Report, Order, TeamReport, TeamOrder)
    assert {kind for union in unions for kind in get_args(union)} == {type(message) for message in LONGEST}


def test_orders_for_a_long_prompt_have_room_to_spare() -> None:
    """A read is one order for as many blocks as fit into a batch, which is set in bytes."""
    assert LONG_PROMPT <= MAX_ORDER_BLOCKS


def _is_refused(decode, data: bytes) -> bool:
    try:
        decode(data)
    except messages.MalformedMessage:
        return True
    return False

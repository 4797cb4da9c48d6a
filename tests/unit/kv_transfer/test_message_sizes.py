"""No message outgrows the channel that carries it, however long the prompts and however large the groups.

The longest of each kind: names and reasons of all the characters that they may have, and 1M tokens in blocks of 16.
"""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from baton.kv_transfer.channel import MAX_MESSAGE_BYTES
from baton.kv_transfer.codec import MAX_REASON_CHARS, encode
from baton.kv_transfer.errors import MalformedMessage
from baton.kv_transfer.group import read_messages, rpc
from baton.kv_transfer.group.rank_reader import RankMemory
from baton.kv_transfer.group.read_messages import MAX_ORDER_BLOCKS, READS
from baton.kv_transfer.group.rpc import MAX_RANKS
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
from baton.kv_transfer.staging import group_copies
from baton.kv_transfer.staging.group_copies import COPIES, MAX_PAIRS
from baton.kv_transfer.tiers import group as tier_group
from baton.kv_transfer.tiers.group import MAX_FOUND, MAX_MOVES, TIERS
from baton.kv_transfer.tiers.tier_index import Loss, Move
from baton.kv_transfer.transports import PeerState, ReadState

LONG_PROMPT = 2**20 // 16  # blocks
ID, NAME, REASON = 2**63 - 1, 4096 * "語", MAX_REASON_CHARS * "語"
BLOCK = 2**32  # of 16 tokens: more than any memory has
ENGINE = EngineKey(NAME, ID)
ENDS = LeaseKey(ENGINE, NAME, ID, ID), ReaderKey(ENGINE, ID)
METADATA, DIGESTS = bytes(MAX_METADATA_BYTES), bytes(MAX_DIGESTS_BYTES)
MOVE = Move(bytes(16), "pool", BLOCK, "disk", BLOCK)

LONGEST = [
    messages.HandshakeRequest(ENGINE, ENGINE, NAME, NAME, DigestMode.VERIFY),
    messages.HandshakeAccepted(ENGINE, ENGINE, METADATA),
    messages.HandshakeRefused(ENGINE, ENGINE, REASON),
    messages.Claim(*ENDS, ID),
    messages.Renew(*ENDS, ID),
    messages.Granted(*ENDS, ID, MAX_LEASE_S, ID),
    messages.Grown(*ENDS, ID),
    messages.ClaimRefused(*ENDS, REASON),
    messages.Withdrawn(*ENDS),
    messages.AskDigests(*ENDS, ID),
    messages.Digests(*ENDS, ID, DIGEST_BLOCKS, MAX_RANKS * (DIGESTS[: MAX_DIGESTS_BYTES // MAX_RANKS],)),
    messages.Finish(*ENDS),
    messages.AbortRead(*ENDS),
    rpc.Join(1, NAME, msgspec.Raw(encode(read_messages.ReadDetails(ID, NAME, RankMemory(0, 1, METADATA))))),
    rpc.GiveUp(1, REASON),
    rpc.Ping(),
    read_messages.PeerReport(ID, PeerState.CONNECTING, REASON),
    read_messages.ReadReport(ID, ReadState.RUNNING, REASON, True, ID, ID),
    read_messages.CheckReport(ID, DIGESTS, REASON),
    read_messages.Alive(),
    read_messages.AddPeer(ID, METADATA),
    read_messages.RemovePeer(ID),
    read_messages.StartRead(ID, ID, MAX_ORDER_BLOCKS * [BLOCK], MAX_ORDER_BLOCKS * [BLOCK]),
    read_messages.MakeDigests(ID, DIGEST_BLOCKS * [BLOCK]),
    read_messages.CompareBlocks(
        ID, ID, DIGEST_BLOCKS * [BLOCK], MAX_RANKS * (DIGESTS[: MAX_DIGESTS_BYTES // MAX_RANKS],)
    ),
    read_messages.MakeProgress(3600.0),
    group_copies.Copy(True, MAX_PAIRS * [(BLOCK, BLOCK)]),
    group_copies.Copied(),
    tier_group.FoundBlocks(MAX_FOUND * [(bytes(16), BLOCK)]),
    tier_group.OpenedTiers(ID, ID, REASON),
    tier_group.MovedBlocks(MAX_MOVES * [Loss.DISK_WRITE], True),
    tier_group.OpenTiers(64 * "f"),
    tier_group.MoveBlocks(MAX_MOVES * [MOVE]),
]


@pytest.mark.parametrize("message", LONGEST, ids=lambda message: type(message).__name__)
def test_the_longest_message_of_each_kind_goes_over_its_channel(message: object) -> None:
    data = messages.encode(message)  # type: ignore[arg-type]
    assert len(data) < MAX_MESSAGE_BYTES
    decoders = [messages.decode, *(decode for service in (READS, COPIES, TIERS) for decode in service[:2])]
    assert any(message == decode(data) for decode in decoders if not _is_refused(decode, data)), "it is one"


def test_every_kind_is_here() -> None:
    unions = (Message, read_messages.Order, read_messages.Report, tier_group.TierOrder, tier_group.TierReport)
    kinds = {kind for union in unions for kind in get_args(union)}
    kinds |= {rpc.Join, rpc.GiveUp, rpc.Ping, group_copies.Copy, group_copies.Copied}
    assert kinds == {type(message) for message in LONGEST}


def test_orders_for_a_long_prompt_have_room_to_spare() -> None:
    """A read is one order for as many blocks as fit into a batch, which is set in bytes."""
    assert LONG_PROMPT <= MAX_ORDER_BLOCKS


def _is_refused(decode, data: bytes) -> bool:
    try:
        decode(data)
    except MalformedMessage:
        return True
    return False

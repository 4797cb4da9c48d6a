"""Bytes from other processes become valid messages or `MalformedMessage`, never anything else."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_transfer.errors import MalformedMessage
from baton.kv_transfer.protocol.block_runs import ARRAY_RUNS, MAX_BLOCKS, BlockRun, decode_runs, encode_runs
from baton.kv_transfer.protocol.messages import (
    DIGEST_BLOCKS,
    MAX_DIGESTS_BYTES,
    AbortRead,
    AskDigests,
    Claim,
    ClaimRefused,
    DigestMode,
    Digests,
    EngineKey,
    Finish,
    Granted,
    Grown,
    HandshakeAccepted,
    HandshakeRefused,
    HandshakeRequest,
    LeaseKey,
    ReaderKey,
    Renew,
    Withdrawn,
    decode,
    encode,
)
from baton.kv_transfer.protocol.ticket import TICKET_VERSION, Ticket

PREFILL, DECODE = EngineKey("prefill-0", 2**62), EngineKey("decode-0", 7)
LEASE, READER = LeaseKey(PREFILL, "request", 3, 12), ReaderKey(DECODE, 5)
MESSAGES = [
    HandshakeRequest(DECODE, PREFILL, "fingerprint", "nixl", DigestMode.OFF),
    HandshakeAccepted(PREFILL, DECODE, b"metadata"),
    HandshakeRefused(PREFILL, DECODE, "because"),
    Claim(LEASE, READER, 1),
    Renew(LEASE, READER, 2),
    Granted(LEASE, READER, 2, 30.0, 3),
    Grown(LEASE, READER, 4),
    AskDigests(LEASE, READER, 3),
    Digests(LEASE, READER, 3, 1, (b"", b"8 bytes.")),
    ClaimRefused(LEASE, READER, "because"),
    Withdrawn(LEASE, READER),
    Finish(LEASE, READER),
    AbortRead(LEASE, READER),
]


BLOCK = st.integers(0, 30) | st.integers(0, 2**32 - 1)
BLOCKS = st.lists(BLOCK, max_size=60) | st.lists(BLOCK, min_size=2 * ARRAY_RUNS, max_size=3 * ARRAY_RUNS)


def a_ticket(**changes: object) -> Ticket:
    ticket = Ticket(
        TICKET_VERSION,
        LEASE,
        "tcp://10.0.0.1:5",
        "fingerprint",
        "nixl",
        40,
        30.0,
        DigestMode.OFF,
        3,
        encode_runs([4, 5, 9]),
    )
    return msgspec.structs.replace(ticket, **changes)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_malformed(data: bytes) -> None:
    with contextlib.suppress(MalformedMessage):
        decode(data)
    with contextlib.suppress(MalformedMessage):
        Ticket.decode(data)


@given(st.sampled_from([*map(encode, MESSAGES), a_ticket().encode()]), st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_message_is_a_message_or_malformed(data: bytes, at: int, byte: int) -> None:
    damaged = data[: at % len(data)] + bytes([byte]) + data[at % len(data) + 1 :]
    for read in (decode, Ticket.decode):
        for piece in (damaged, data[: at % len(data)]):
            with contextlib.suppress(MalformedMessage):
                read(piece)


def test_deep_nesting_behind_a_message_is_malformed() -> None:
    message = encode(Finish(LEASE, READER))
    with pytest.raises(MalformedMessage):
        decode(bytes([message[0] + 1]) + message[1:] + b"\x91" * 100_000 + b"\xc0")


@pytest.mark.parametrize(
    "message",
    [
        Granted(LEASE, READER, 1, float("inf"), 3),
        Granted(LEASE, READER, 1, float("nan"), 3),
        Granted(LEASE, READER, 1, -1.0, 3),
        Claim(LEASE, READER, -1),
        Claim(LeaseKey(PREFILL, "", 0, 0), READER, 1),
        Claim(LeaseKey(EngineKey("p", 2**63), "r", 0, 0), READER, 1),
        Grown(LEASE, READER, 4, (2**40,)),
        Digests(LEASE, READER, 0, DIGEST_BLOCKS + 1, (b"",)),
    ],
)
def test_values_out_of_range_are_malformed(message) -> None:
    with pytest.raises(MalformedMessage):
        decode(encode(message))


def test_digests_that_would_not_fit_into_an_order_to_the_other_ranks_are_malformed() -> None:
    half = bytes(MAX_DIGESTS_BYTES // 2)
    whole = Digests(LEASE, READER, 0, DIGEST_BLOCKS, (half, half))
    assert decode(encode(whole)) == whole
    with pytest.raises(MalformedMessage, match="digests of 1048577 bytes"):
        decode(msgspec.msgpack.encode((12, LEASE, READER, 0, DIGEST_BLOCKS, (half, half + b"1"))))


@pytest.mark.parametrize("run", [BlockRun(2**40, 1), BlockRun(2**63 - 1, 2), BlockRun(-1, 1)])
def test_a_ticket_for_blocks_with_numbers_that_no_engine_has_is_malformed(run: BlockRun) -> None:
    """Their places in memory would be beyond 64 bits."""
    with pytest.raises(MalformedMessage):
        Ticket.decode(a_ticket(runs=msgspec.Raw(msgspec.msgpack.encode([run]))).encode())


@given(BLOCKS)
def test_runs_keep_blocks_and_their_order(blocks: list[int]) -> None:
    assert decode_runs(encode_runs(blocks)).blocks.tolist() == blocks


@given(BLOCKS)
def test_any_decoder_of_msgpack_reads_runs_and_runs_of_any_encoder_are_read(blocks: list[int]) -> None:
    """Engines of another version write numbers of other lengths."""
    encoded = encode_runs(blocks)
    runs = msgspec.msgpack.decode(encoded, type=list[BlockRun])
    assert [run.first + at for run in runs for at in range(run.count)] == blocks
    shortest = msgspec.Raw(msgspec.msgpack.encode(runs))
    for ours, theirs in zip(decode_runs(encoded), decode_runs(shortest), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("num_runs", [3, 2 * ARRAY_RUNS])
@given(st.binary(max_size=40), st.integers(0, 2**12), st.integers(0, 255))
def test_any_bytes_are_runs_or_malformed(num_runs: int, data: bytes, at: int, byte: int) -> None:
    """Reading runs as one array, or one by one, must allow the same."""
    valid = bytes(encode_runs(range(0, 3 * num_runs, 3)))
    damaged = valid[: at % len(valid)] + bytes([byte]) + valid[at % len(valid) + 1 :]
    for read in (data, damaged, valid[: at % len(valid)], valid + data):
        try:
            expected = msgspec.msgpack.decode(read, type=list[BlockRun])
        except (msgspec.DecodeError, UnicodeDecodeError):
            expected = None
        if expected is None or sum(run.count for run in expected) > MAX_BLOCKS:
            with pytest.raises(MalformedMessage):
                decode_runs(msgspec.Raw(read))
        else:
            firsts, counts, _ = decode_runs(msgspec.Raw(read))
            assert list(map(BlockRun, firsts, counts)) == expected


def test_neighbouring_blocks_share_a_run() -> None:
    assert len(decode_runs(encode_runs(range(1000))).firsts) == 1
    assert len(a_ticket(runs=encode_runs(range(1000))).encode()) < 120


def test_a_ticket_survives_the_wire() -> None:
    ticket = Ticket.decode(a_ticket().encode())
    assert ticket == a_ticket()
    assert ticket.block_ids.tolist() == [4, 5, 9]


def test_a_ticket_of_another_version_says_so() -> None:
    with pytest.raises(MalformedMessage, match="has version 3, this engine reads version 2"):
        Ticket.decode(a_ticket(version=3).encode())


def test_a_ticket_cannot_make_its_reader_expand_more_blocks_than_any_engine_has() -> None:
    with pytest.raises(MalformedMessage, match=f"2 runs have {MAX_BLOCKS + 1} blocks; at most"):
        Ticket.decode(a_ticket(runs=encode_runs([*range(MAX_BLOCKS), 0])).encode())


@pytest.mark.parametrize("num_runs", [2, ARRAY_RUNS])
@pytest.mark.parametrize("count", [0, MAX_BLOCKS + 1])
def test_a_run_of_no_blocks_or_of_more_than_any_engine_has_is_malformed(count: int, num_runs: int) -> None:
    runs = bytes(encode_runs(range(0, 2 * num_runs, 2)))
    changed = runs[:-4] + count.to_bytes(4, "big")
    with pytest.raises(MalformedMessage):
        Ticket.decode(a_ticket(runs=msgspec.Raw(changed)).encode())


def test_a_ticket_without_blocks_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="no blocks"):
        Ticket.decode(a_ticket(runs=encode_runs([])).encode())


def test_a_ticket_whose_blocks_and_tokens_disagree_is_malformed() -> None:
    a_ticket().check_block_size(16)
    with pytest.raises(MalformedMessage, match="3 blocks for 49 tokens; blocks of 16 need 4"):
        a_ticket(num_tokens=49).check_block_size(16)

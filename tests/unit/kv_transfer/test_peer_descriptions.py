"""A peer describes memory that we are to read: what it says is compared with what the driver knows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_transfer import codec
from baton.kv_transfer.errors import MalformedMessage, TransportError
from baton.kv_transfer.transports import ByteRange
from baton.kv_transfer.transports.common import check_ranges
from baton.kv_transfer.transports.cuda_ipc import ALIGNMENT, check_shared, decode_metadata


def test_a_peer_of_cuda_ipc_has_memory_for_at_least_one_copy() -> None:
    """With less, the transfer thread would divide by zero when it times copies."""

    def metadata(num_bytes: int) -> bytes:
        memory = bytes(64), 0, num_bytes
        return codec.encode(("holder", "boot", "gpu", memory, memory, bytes(16)))

    assert decode_metadata(metadata(ALIGNMENT)).blocks.num_bytes == ALIGNMENT
    with pytest.raises(MalformedMessage):
        decode_metadata(metadata(ALIGNMENT - 1))


LONG = st.integers(-(2**70), 2**70)


@given(st.one_of(LONG, st.integers(-64, 4096)), st.one_of(LONG, st.integers(-64, 4096)), st.integers(0, 2**48))
def test_memory_of_a_peer_is_read_only_if_all_of_it_is_within_the_allocation(
    offset: int, num_bytes: int, allocation_bytes: int
) -> None:
    try:
        check_shared(offset, num_bytes, allocation_bytes, "blocks")
    except TransportError:
        is_within = num_bytes > 0 and offset >= 0 and offset + num_bytes <= allocation_bytes
        assert not is_within or offset % ALIGNMENT
    else:
        allocation = range(allocation_bytes)
        assert offset in allocation
        assert offset + num_bytes - 1 in allocation
        assert num_bytes > 0
        assert offset % ALIGNMENT == 0, "the copy kernel reads words of 16 bytes"


@pytest.mark.parametrize(
    ("offset", "num_bytes", "reason"),
    [
        (0, 4096, ""),
        (4080, 16, ""),
        (16, 4096, "its blocks, 4096 bytes at 16, are outside the 4096 bytes of their allocation"),
        (-16, 16, "16 bytes at -16, are outside"),
        (2**62, 2**62, "are outside"),
        (8, 16, "its blocks begin at 8 of their allocation, not at a multiple of 16"),
    ],
)
def test_memory_of_a_peer_that_does_not_fit_is_refused_by_name(offset: int, num_bytes: int, reason: str) -> None:
    if reason:
        with pytest.raises(TransportError, match=reason):
            check_shared(offset, num_bytes, 4096, "blocks")
    else:
        check_shared(offset, num_bytes, 4096, "blocks")


@pytest.mark.parametrize(
    ("outside", "reason"),
    [
        ((4090, 0, 7), "7 bytes at 4090 are outside the 4096 bytes of the peer"),
        ((-1, 0, 7), "7 bytes at -1 are outside the 4096 bytes of the peer"),
        ((0, 1024, 1), "1 bytes at 1024 are outside the 1024 bytes of our region"),
        ((0, 0, 0), "0 bytes at 0 are outside the 4096 bytes of the peer"),
    ],
)
def test_a_range_among_others_that_is_outside_a_region_is_named(outside: tuple[int, int, int], reason: str) -> None:
    within = [ByteRange(64 * number, 16 * number, 16) for number in range(64)]
    with pytest.raises(TransportError, match=f"^{reason}$"):
        check_ranges([*within[:20], ByteRange(*outside), *within[20:]], 1024, 4096, "the peer")


WORDS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-64, 4096))


@given(WORDS, WORDS, WORDS, st.integers(1, 2**62), st.integers(1, 2**62))
def test_no_range_reaches_beyond_a_region_however_its_numbers_overflow(
    remote: int, local: int, num_bytes: int, our_bytes: int, their_bytes: int
) -> None:
    is_within = num_bytes > 0 and 0 <= remote <= their_bytes - num_bytes and 0 <= local <= our_bytes - num_bytes
    try:
        check_ranges([(remote, local, num_bytes)], our_bytes, their_bytes, "the peer")  # type: ignore[list-item]
    except TransportError:
        assert not is_within
    else:
        assert is_within

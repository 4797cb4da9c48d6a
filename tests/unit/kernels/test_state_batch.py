"""A step's sequences are cut into chunks, and a checkpoint can be requested at the end of each."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.kernels.state_batch import CHUNK, LEAST_CUT, Cuts, StateBatch, StateCheckpoint, most_chunks


def test_short_sequences_in_front_go_token_by_token_and_the_others_in_chunks() -> None:
    batch = StateBatch.plan([1, 1, 130, 0, 1], [4, -1, 2, 3, 0], [4, 5, 2, 3, -1])
    assert (batch.num_seqs, batch.num_decodes.item(), batch.most_prefills, batch.num_chunks) == (5, 2, 3, 4)
    assert batch.query_start.tolist() == [0, 1, 2, 132, 132, 133]
    assert batch.chunk_start.tolist() == [2, 66, 130, 132, 133]
    assert batch.chunk_seqs.tolist() == [2, 2, 2, 4]
    assert batch.seq_chunks.tolist() == [0, 0, 0, 3, 3, 4]
    assert (batch.sources.tolist(), batch.targets.tolist()) == ([4, -1, 2, 3, 0], [4, 5, 2, 3, -1])


def test_a_chunk_ends_at_every_checkpoint() -> None:
    kept = [StateCheckpoint(0, 100, 7), StateCheckpoint(0, 128, 8), StateCheckpoint(1, 10, 9)]
    batch = StateBatch.plan([200, 10], [0, 1], [0, 1], checkpoints=kept)
    assert batch.chunk_start.tolist() == [0, 64, 100, 128, 192, 200, 210]
    assert batch.checkpoints.tolist() == [-1, 7, 8, -1, -1, 9]


def test_a_step_of_decodes_has_no_chunks() -> None:
    batch = StateBatch.plan([1, 1, 0], [0, 1, -1], [0, 1, -1])
    assert (batch.num_decodes.item(), batch.num_chunks, batch.seq_chunks.tolist()) == (3, 0, [0, 0, 0, 0])


def test_a_few_tokens_may_be_a_decode() -> None:
    batch = StateBatch.plan([1, 4, 5, 2], [0] * 4, [0] * 4, decode_tokens=4)
    assert (batch.num_decodes.item(), batch.chunk_seqs.tolist()) == (2, [2, 3])


def test_padding_of_a_step_has_no_tokens() -> None:
    cuts = Cuts.of([1, 70], [0, 1]).padded(num_seqs=4, num_chunks=5)
    assert cuts.query_start == [0, 1, 71, 71, 71]
    assert cuts.chunk_start == [1, 65, 71, 71, 71, 71]
    assert (cuts.seq_chunks, cuts.num_decodes) == ([0, 0, 2, 2, 2], 1)
    assert cuts.checkpoints == [-1] * 5


@given(
    st.lists(st.integers(1, 300), max_size=20),
    st.sampled_from([16, 64, 100, 512]),
    st.lists(st.integers(0, 600), min_size=20, max_size=20),
)
def test_no_step_has_more_chunks_than_the_bound_for_its_size(
    lengths: list[int], spacing: int, starts: list[int]
) -> None:
    kept = [
        StateCheckpoint(seq, cut - start, 7 + seq)
        for seq, (start, length) in enumerate(zip(starts, lengths, strict=False))
        for cut in range((start // spacing + 1) * spacing, start + length, spacing)
        if cut - start >= LEAST_CUT and any(other > 1 for other in lengths[: seq + 1])
    ]
    cuts = Cuts.of(lengths, [0] * len(lengths), checkpoints=kept)
    decodes = cuts.num_decodes
    assert len(cuts.chunk_seqs) <= most_chunks(len(lengths) - decodes, sum(lengths) - decodes, spacing)


@given(st.data())
def test_chunks_cover_every_token_once(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=5))
    first = next((i for i, length in enumerate(lengths) if length > 1), len(lengths))
    kept = [
        StateCheckpoint(seq, tokens, 100 + index)
        for index, (seq, tokens) in enumerate(
            (seq, tokens)
            for seq, length in enumerate(lengths)
            if seq >= first and length >= LEAST_CUT
            for tokens in data.draw(st.sets(st.integers(LEAST_CUT, length), max_size=4))
        )
    ]
    batch = StateBatch.plan(lengths, [0] * len(lengths), [0] * len(lengths), checkpoints=kept)
    starts, chunks = batch.query_start.tolist(), batch.chunk_start.tolist()
    assert chunks[0] == starts[first]
    assert chunks[-1] == starts[-1]
    assert all(1 <= end - begin <= CHUNK for begin, end in itertools.pairwise(chunks))
    for index, seq in enumerate(batch.chunk_seqs.tolist()):
        assert starts[seq] <= chunks[index] < chunks[index + 1] <= starts[seq + 1]
        assert batch.seq_chunks[seq] <= index < batch.seq_chunks[seq + 1]
    ends = {end: slot for end, slot in zip(chunks[1:], batch.checkpoints.tolist(), strict=True) if slot >= 0}
    assert ends == {starts[seq] + tokens: slot for seq, tokens, slot in kept}


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (StateCheckpoint(0, 1, 5), "give one of 1 to 2"),
        (StateCheckpoint(3, 64, 5), "give one of 1 to 2"),
        (StateCheckpoint(1, 101, 5), "behind 101 of sequence 1's 100 tokens"),
        (StateCheckpoint(1, LEAST_CUT - 1, 5), "give from 8 to all"),
        (StateCheckpoint(2, 2, 5), "give from 8 to all"),
    ],
)
def test_impossible_checkpoints_are_refused(checkpoint: StateCheckpoint, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StateBatch.plan([1, 100, 3], [0, 1, 2], [0, 1, 2], checkpoints=[checkpoint])


def test_only_a_near_first_checkpoint_may_overwrite_the_source() -> None:
    near, far = StateCheckpoint(0, 500, 7), StateCheckpoint(0, 513, 7)
    StateBatch.plan([600], [7], [8], checkpoints=[near, StateCheckpoint(0, 550, 9)])
    for checkpoints in ([far], [StateCheckpoint(0, 100, 9), near]):
        with pytest.raises(ValueError, match="must be its first, behind at most 512 tokens"):
            StateBatch.plan([600], [7], [8], checkpoints=checkpoints)


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="one of each for every sequence"):
        StateBatch.plan([1, 2], [0], [0, 1])
    with pytest.raises(ValueError, match="give 0 or more"):
        StateBatch.plan([-1], [0], [0])
    with pytest.raises(TypeError, match=r"sources is torch\.int64"):
        StateBatch(*(torch.zeros(2, dtype=dtype) for dtype in (torch.int32, torch.int64)), *[torch.zeros(1)] * 6, 0, 0)  # type: ignore[arg-type]

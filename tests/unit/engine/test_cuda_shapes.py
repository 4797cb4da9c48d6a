"""The sizes of steps that are captured on a GPU."""

from __future__ import annotations

import pytest

from baton.engine.core.step import PADDING, StepSize
from baton.engine.worker.backends.cuda_shapes import CudaShapes
from baton.engine.worker.shapes import StepLimits


def shapes_of(
    *,
    max_num_seqs: int = 512,
    max_num_batched_tokens: int = 16384,
    max_model_len: int = 4096,
    max_tokens: int = 1024,
    max_drafts: int = 0,
) -> CudaShapes:
    limits = StepLimits(max_num_seqs, max_num_batched_tokens, max_model_len, max_drafts)
    return CudaShapes(limits, max_tokens=max_tokens)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 60, 256, 500])
@pytest.mark.parametrize("max_tokens", [0, 16, 100, 1024])
def test_every_size_that_is_chosen_is_captured_and_large_enough(max_num_seqs: int, max_tokens: int) -> None:
    shapes = shapes_of(max_num_seqs=max_num_seqs, max_tokens=max_tokens)
    captured = list(shapes.in_capture_order())
    assert len(set(captured)) == len(captured)
    for num_seqs in range(1, max_num_seqs + 1):
        decode = shapes.decode(num_seqs, 4096)
        assert decode in captured
        assert decode.max_seq_len == 4096
        assert num_seqs <= decode.num_seqs == decode.num_tokens == decode.num_decodes
        assert decode.num_seqs < 2 * num_seqs
        assert decode.num_seqs <= num_seqs + 47
        for num_tokens in {num_seqs, num_seqs + 7, max_tokens, max_tokens + 1}:
            if num_tokens < num_seqs:
                continue
            mix = shapes.chunks(num_seqs, num_tokens)
            assert (mix is None) == (num_tokens > max_tokens)
            if mix is not None:
                assert mix in captured
                assert (mix.num_seqs >= num_seqs, mix.num_tokens >= num_tokens) == (True, True)


def test_one_short_sequence_has_sizes_of_its_own() -> None:
    shapes = shapes_of(max_model_len=40960)
    lengths = [shapes.decode(1, length).max_seq_len for length in (1, 1024, 1025, 4096, 4097, 40960)]
    assert lengths == [1024, 1024, 4096, 4096, 40960, 40960]
    assert {shapes.decode(1, length) for length in (1, 1025, 4097)} <= set(shapes.in_capture_order())
    assert shapes.decode(2, 10).max_seq_len == 40960
    few = shapes_of(max_model_len=500)
    assert few.decode(1, 10) == few.decode(1, 500)
    assert few.decode(1, 500).max_seq_len == 500


def test_the_largest_are_captured_first() -> None:
    captured = list(shapes_of().in_capture_order())
    mixes = [shape for shape in captured if not shape.is_decode]
    decodes = [shape for shape in captured if shape.is_decode]
    assert captured == mixes + decodes
    for kind in (mixes, decodes):
        sizes = [(shape.num_tokens, shape.num_seqs) for shape in kind]
        assert sizes == sorted(sizes, reverse=True)
    assert len(captured) < 100, "each takes a few milliseconds at start"


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 60, 512])
@pytest.mark.parametrize("max_drafts", [1, 4, 15])
def test_mixes_with_drafts_are_captured_for_any_number_of_draws(max_num_seqs: int, max_drafts: int) -> None:
    shapes = shapes_of(max_num_seqs=max_num_seqs, max_drafts=max_drafts)
    captured = set(shapes.in_capture_order())
    most_draws = max(max_num_seqs, min(512, max_num_seqs * (1 + max_drafts)))
    for num_seqs in range(2, max_num_seqs + 1):
        for num_drafts in {1, max_drafts * (num_seqs - 1)}:
            for num_prompt_tokens in (2, 100, 500):
                num_tokens, num_draws = num_seqs - 1 + num_drafts + num_prompt_tokens, num_seqs + num_drafts
                if num_draws > most_draws:
                    continue
                size = StepSize(num_tokens, num_seqs, num_draws - 1, False, num_drafts, min(num_drafts, max_drafts))
                mix = shapes.fitting([size], single_seq_len=0)
                assert (mix is None) == (num_tokens > 1024)
                if mix is not None:
                    assert mix in captured
                    assert mix.num_seqs >= num_seqs
                    assert mix.num_tokens >= num_tokens
                    assert mix.num_tokens > mix.wanted_rows == mix.num_draws >= num_draws
                    assert not mix.is_drafted
                    assert mix.max_drafts == max_drafts


DECODES, DRAFTED, PROMPT = StepSize(5, 5, 5), StepSize(9, 4, 9, False, 5, 3), StepSize(40, 2, 1)
SCORED = StepSize(40, 2, 40, True)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([DECODES, PADDING], (8, 8, 0)),
        ([DRAFTED, PADDING], (16, 16, 4)),
        ([DECODES, DRAFTED], (32, 32, 4)),
        ([DECODES, PROMPT], (64, 8, 0)),
        ([DRAFTED, PROMPT], (64, 40, 4)),
        ([DRAFTED, DECODES, PROMPT], (64, 40, 4)),
        ([PADDING, SCORED, DRAFTED], None),
    ],
)
def test_ranks_that_run_a_step_together_choose_the_same_size(
    sizes: list[StepSize], expected: tuple[int, int, int] | None
) -> None:
    """Each by what all of them told, whatever its own part is."""
    shapes = shapes_of(max_num_seqs=32, max_drafts=4, max_model_len=40960)
    chosen = {shapes.fitting(sizes, single_seq_len=length) for length in (0, 100, 5000)}
    found = {shape and (shape.num_tokens, shape.wanted_rows, shape.max_drafts) for shape in chosen}
    assert found == {expected}


def test_a_step_is_never_larger_than_the_batch_may_be() -> None:
    shapes = shapes_of(max_num_batched_tokens=300, max_num_seqs=300)
    assert max(shape.num_tokens for shape in shapes.in_capture_order()) == 300

"""The sizes of steps that are captured on a GPU."""

from __future__ import annotations

import pytest

from baton.engine.worker.shapes import CudaShapes, StepLimits


def shapes_of(
    *, max_num_seqs: int = 512, max_num_batched_tokens: int = 16384, max_model_len: int = 4096, max_tokens: int = 1024
) -> CudaShapes:
    return CudaShapes(StepLimits(max_num_seqs, max_num_batched_tokens, max_model_len), max_tokens=max_tokens)


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
    lengths = [shapes.decode(1, alone).max_seq_len for alone in (1, 1024, 1025, 4096, 4097, 40960)]
    assert lengths == [1024, 1024, 4096, 4096, 40960, 40960]
    assert {shapes.decode(1, alone) for alone in (1, 1025, 4097)} <= set(shapes.in_capture_order())
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


def test_a_step_is_never_larger_than_the_batch_may_be() -> None:
    shapes = shapes_of(max_num_batched_tokens=300, max_num_seqs=300)
    assert max(shape.num_tokens for shape in shapes.in_capture_order()) == 300

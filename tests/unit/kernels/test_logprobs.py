from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton.kernels import logprobs
from baton.kernels.logprobs import cpu, reference

TokenLogprobs = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]]
both = pytest.mark.parametrize(
    "token_logprobs", [reference.token_logprobs, logprobs.token_logprobs], ids=["reference", "fast"]
)


@both
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 100, 8192])
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
@pytest.mark.usefixtures("poisoned_outputs")
def test_logprobs_are_those_of_the_whole_log_softmax(
    token_logprobs: TokenLogprobs, vocab_size: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(9, vocab_size, generator=generator) * scale + 10
    token_ids = torch.randint(vocab_size, (9,), generator=generator)
    whole = logits.double().log_softmax(dim=-1)
    same_precision = (logits.log_softmax(dim=-1) - whole).abs().max()
    for k in {0, 1, min(5, vocab_size), min(20, vocab_size)}:
        chosen, rank, top_ids, top_logprobs = token_logprobs(logits, token_ids, k)
        tolerance = 4 * float(same_precision) + 1e-6
        torch.testing.assert_close(chosen.double(), whole.gather(1, token_ids[:, None])[:, 0], atol=tolerance, rtol=0)
        assert rank.tolist() == [
            1 + int((row > row[token]).sum()) for row, token in zip(logits, token_ids, strict=True)
        ]
        assert top_logprobs.shape == top_ids.shape == (9, k)
        best = whole.topk(k, dim=-1)
        torch.testing.assert_close(top_logprobs.double(), best.values, atol=tolerance, rtol=0)
        assert top_ids.equal(best.indices)


@both
def test_equal_logits_share_their_rank(token_logprobs: TokenLogprobs) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 1.0]]).repeat(6, 1)
    _, rank, top_ids, top_logprobs = token_logprobs(logits, torch.arange(6), 4)
    assert rank.tolist() == [5, 1, 1, 4, 1, 5]
    assert sorted(top_ids[0, :3].tolist()) == [1, 2, 4]
    assert top_ids[0, 3] == 3
    assert top_logprobs[0, :3].unique().numel() == 1


@both
def test_impossible_tokens_have_minus_infinity(token_logprobs: TokenLogprobs) -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    chosen, rank, _, top_logprobs = token_logprobs(logits, torch.tensor([1]), 3)
    assert chosen.tolist() == [-torch.inf]
    assert rank.tolist() == [3]
    torch.testing.assert_close(top_logprobs, torch.tensor([[0.5, 0.5, 0.0]]).log())


def test_rows_may_start_beyond_four_gibibytes_and_have_gaps() -> None:
    stride = 2**30 + 64  # floats
    wide = torch.empty(stride + 100)  # takes memory only for pages that are written
    logits = wide.as_strided((2, 100), (stride, 1))
    logits[:] = torch.randn(2, 100)
    token_ids = torch.tensor([7, 99])
    for ours, theirs in zip(
        logprobs.token_logprobs(logits, token_ids, 3),
        logprobs.token_logprobs(logits.clone(), token_ids, 3),
        strict=True,
    ):
        assert ours.equal(theirs)


def test_a_row_does_not_depend_on_those_beside_it(num_threads: int) -> None:
    logits = torch.randn(40, 8192) * 3
    token_ids = torch.randint(8192, (40,))
    together = logprobs.token_logprobs(logits, token_ids, 5)
    for row in range(0, 40, 7):
        alone = logprobs.token_logprobs(logits[row : row + 1], token_ids[row : row + 1], 5)
        assert all(a[0].equal(b[row]) for a, b in zip(alone, together, strict=True))


def test_no_rows_give_no_rows() -> None:
    empty = logprobs.token_logprobs(torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64), 2)
    assert [tuple(part.shape) for part in empty] == [(0,), (0,), (0, 2), (0, 2)]


def test_without_a_compiler_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, token_ids = torch.randn(4, 100), torch.arange(4)
    expected = logprobs.token_logprobs(logits, token_ids, 2)
    monkeypatch.setattr(cpu, "native_kernel", lambda: None)
    for ours, theirs in zip(logprobs.token_logprobs(logits, token_ids, 2), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_arguments_that_do_not_fit_the_logits_are_refused() -> None:
    logits = torch.zeros(2, 5)
    with pytest.raises(ValueError, match="one id a row"):
        logprobs.token_logprobs(logits, torch.tensor([1]), 1)
    with pytest.raises(ValueError, match="from 0 to the vocabulary's 5"):
        logprobs.token_logprobs(logits, torch.tensor([1, 2]), 6)
    for beyond in (5, -1):
        with pytest.raises(IndexError, match="the logits have 5 tokens"):
            logprobs.token_logprobs(logits, torch.tensor([1, beyond]), 1)

"""Log-probabilities in Triton, interpreted on a CPU or compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.kernels.logprobs import reference

from ...helpers.aot import compile_for_h200

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def small_tiles(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.kernels.logprobs import gpu

    monkeypatch.setattr(gpu, "TILE", 64)
    monkeypatch.setattr(gpu, "MOST_ALTERNATIVES", 16)
    monkeypatch.setattr(gpu, "PROGRAMS", 6)


def ours(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from baton.kernels.logprobs import gpu

    return gpu.token_logprobs(logits, token_ids, k)


def assert_right(logits: Tensor, k: int) -> None:
    """Check that values are near those of float64, and that ranks and the best tokens are exact."""
    generator = torch.Generator().manual_seed(k)
    token_ids = torch.randint(logits.shape[1], (len(logits),), generator=generator).to(logits.device)
    chosen, rank, top_ids, top_logprobs = ours(logits, token_ids, k)
    exact = reference.token_logprobs(logits.double(), token_ids, k)
    tolerance = 1e-6 * (10 + float(logits.float().abs().max()))
    torch.testing.assert_close(chosen.double(), exact[0].double(), atol=tolerance, rtol=0)
    torch.testing.assert_close(top_logprobs.double(), exact[3].double(), atol=tolerance, rtol=0)
    assert rank.equal(exact[1])
    assert (chosen.dtype, rank.dtype, top_ids.dtype) == (torch.float32, torch.int64, torch.int64)
    assert logits.gather(1, top_ids).equal(logits.gather(1, exact[2])), "any of several equal logits may come"
    assert all(len(set(row)) == k for row in top_ids.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [1, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.usefixtures("small_tiles", "poisoned_outputs")
def test_logprobs_are_those_of_the_reference(triton_device: torch.device, vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    scales = torch.tensor([0.1, 3.0, 40.0])[:, None]
    logits = (torch.randn(3, vocab_size, generator=generator) * scales + 10).to(triton_device, dtype)
    for k in {0, 1, min(16, vocab_size), min(30, vocab_size)}:
        assert_right(logits, k)


@pytest.mark.usefixtures("small_tiles")
def test_equal_logits_share_their_rank_and_come_in_order(triton_device: torch.device) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 1.0]], device=triton_device).repeat(6, 1)
    _, rank, top_ids, _ = ours(logits, torch.arange(6, device=triton_device), 5)
    assert rank.tolist() == [5, 1, 1, 4, 1, 5]
    assert top_ids.tolist() == [[1, 2, 4, 3, 0]] * 6


@pytest.mark.usefixtures("small_tiles")
def test_impossible_tokens_have_minus_infinity(triton_device: torch.device) -> None:
    logits = torch.full((2, 150), -torch.inf, device=triton_device)
    logits[:, [0, 130]] = 0.0
    chosen, rank, top_ids, top_logprobs = ours(logits, torch.tensor([1, 150], device=triton_device), 4)
    assert chosen.tolist() == [-torch.inf] * 2, "token 150 is not in the vocabulary"
    assert rank.tolist() == [3, 3]
    assert top_ids[:, :2].tolist() == [[0, 130]] * 2
    torch.testing.assert_close(top_logprobs.cpu(), torch.tensor([[0.5, 0.5, 0.0, 0.0]]).log().repeat(2, 1))


@pytest.mark.usefixtures("small_tiles")
def test_logits_may_be_a_part_of_something_wider(triton_device: torch.device) -> None:
    wide = torch.randn(6, 300, device=triton_device)
    assert_right(wide[::2, 50:250], 3)
    assert_right(wide.T[:4], 3)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernels_compile_for_an_h200(dtype: str) -> None:
    pytest.importorskip("triton")
    from baton.kernels.logprobs import gpu

    inputs = {"logits_ptr": f"*{dtype}", "token_ids_ptr": "*i64", "vocab_size": "i32:16", "logits_stride": "i32:16"}
    numbers = {"ids_stride": "i32", "alternatives": "i32"}
    partial = {"best_ptr": "*fp32", "weight_ptr": "*fp32", "above_ptr": "*i32", "keys_ptr": "*i64"}
    constants = {"SLOTS": gpu.MOST_ALTERNATIVES}
    signature = {**inputs, **numbers, **partial}
    shares = compile_for_h200(gpu.shares_kernel, signature, {**constants, "TILE": gpu.TILE}, num_warps=1)
    assert shares.widest_load_bytes == 16
    outputs = {"chosen_ptr": "*fp32", "normalizer_ptr": "*fp32", "rank_ptr": "*i64", "top_ids_ptr": "*i64"}
    signature |= {**outputs, "top_logprobs_ptr": "*fp32", "shares": "i32"}
    compile_for_h200(gpu.rows_kernel, signature, {**constants, "MOST_SHARES": gpu.MOST_SHARES}, num_warps=4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logprobs_of_a_real_vocabulary(dtype: torch.dtype) -> None:
    logits = (torch.randn(33, 151_936, device="cuda") * 4).to(dtype)
    for k in (0, 1, 20, 100):
        assert_right(logits, k)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    logits, token_ids = torch.randn(4, 5000, device="cuda"), torch.arange(4, device="cuda")
    ours(logits, token_ids, 5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours(logits, token_ids, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_rows_may_start_beyond_four_gibibytes() -> None:
    stride = 2**30 + 64  # elements: the third row starts beyond 2**31 of them
    wide = torch.empty(2 * stride + 300, dtype=torch.bfloat16, device="cuda")
    logits = wide.as_strided((3, 300), (stride, 1))
    logits.copy_(torch.randn(3, 300))
    assert_right(logits, 5)

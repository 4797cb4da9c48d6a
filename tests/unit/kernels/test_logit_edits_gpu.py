"""Edits of logits before sampling in Triton, interpreted on a CPU or compiled on a GPU, against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.engine.core.sampling import SamplingParams
from baton.kernels.sampling import (
    AllowedTokens,
    BadWords,
    Penalties,
    SamplingBatch,
    SamplingRows,
    TokenHistory,
    reference,
)

from ...helpers.aot import compile_for_h200

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.float16], ids=str)
def test_penalties_count_as_in_the_reference(
    triton_device: torch.device, dtype: torch.dtype, logits_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton.kernels.sampling import gpu
    from baton.kernels.sampling.gpu import logit_edits as kernels

    monkeypatch.setattr(kernels, "PROGRAMS", 2)
    monkeypatch.setattr(kernels, "ROWS_AT_ONCE", 4)
    generator = torch.Generator().manual_seed(2)
    vocab_size, rows, capacity = 30, 12, 600
    table = torch.randint(-1, vocab_size + 1, (rows + 5, capacity), generator=generator).to(dtype)
    prompt_lens = torch.randint(0, 300, (rows,), generator=generator)
    positions = prompt_lens + torch.randint(0, 300, (rows,), generator=generator)
    prompt_lens[3], positions[3], positions[5] = 0, 0, prompt_lens[5]
    penalized = torch.tensor([0, 3, 5, 6, 7, 11])
    numbers = torch.rand(3, len(penalized), generator=generator) * 1.5 + 0.2
    numbers[:, 0] = torch.tensor([1.3, 0.0, 0.0])
    history = TokenHistory(
        table.clamp(0, vocab_size - 1), torch.randperm(rows + 5, generator=generator)[:rows], prompt_lens
    )
    logits = (torch.randn(rows, vocab_size, generator=generator) * 2).to(logits_dtype)
    batch = SamplingBatch(
        seeds=positions, positions=positions, penalties=Penalties(penalized, *numbers), history=history
    )
    expected = reference.edit_logits(logits.float(), batch)
    moved = replace(
        batch,
        positions=positions.to(triton_device),
        penalties=Penalties(penalized.to(triton_device), *numbers.to(triton_device)),
        history=TokenHistory(*(part.to(triton_device) for part in (history.token_ids, history.rows, prompt_lens))),
    )
    before = logits.to(triton_device)
    for _ in range(2):  # the workspace's counts are reset, so a second step starts from zero
        assert gpu.edit_logits(before, moved).cpu().equal(expected)
    assert before.cpu().equal(logits), "the caller's logits must not change"


def test_the_other_edits_come_before_penalties(triton_device: torch.device) -> None:
    from baton.kernels.sampling import gpu

    def edited(device: torch.device, edit: Callable[[Tensor, SamplingBatch], Tensor]) -> Tensor:
        table = torch.randint(40, (8, 32), generator=torch.Generator().manual_seed(0)).int().to(device)
        rows = SamplingRows(8, 40, table)
        request = SamplingParams(
            repetition_penalty=1.5,
            presence_penalty=0.5,
            min_tokens=4,
            max_tokens=9,
            logit_bias={3: 1.5, 8: -2.0},
            allowed_token_ids=list(range(0, 40, 2)),
            bad_words_token_ids=[[4], [6, 8], [int(table[2, 4]), int(table[2, 5]), 10]],
        )
        rows.start(2, request, seed=1, prompt_len=3, stop_token_ids=[0, 1])
        rows.start(5, SamplingParams(), seed=1, prompt_len=3, stop_token_ids=[0])
        return edit(torch.linspace(-3, 3, 80, device=device).view(2, 40), rows.batch([2, 5], [6, 8]))

    expected = edited(torch.device("cpu"), reference.edit_logits)
    assert expected[0].isneginf().sum() > 20
    assert edited(triton_device, gpu.edit_logits).cpu().equal(expected)


@pytest.mark.parametrize("vocab_size", [1, 31, 33, 1024, 2500])
def test_masks_keep_the_logits_of_allowed_tokens(triton_device: torch.device, vocab_size: int) -> None:
    from baton.kernels.sampling import gpu

    generator = torch.Generator().manual_seed(vocab_size)
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator).int()
    masked, slots = torch.tensor([4, 0, 3]), torch.arange(5)
    logits = torch.randn(5, vocab_size, generator=generator).half()
    logits[4] = math.nan
    batch = SamplingBatch(seeds=slots, positions=slots, allowed=AllowedTokens(masked, bits))
    on_device = replace(batch, allowed=AllowedTokens(masked.to(triton_device), bits.to(triton_device)))
    before = logits.to(triton_device)
    edited = gpu.edit_logits(before, on_device).cpu()
    assert edited.allclose(reference.edit_logits(logits.float(), batch), rtol=0, atol=0, equal_nan=True)
    assert edited.isneginf().any()
    assert before.cpu().allclose(logits, equal_nan=True), "the caller's logits must not change"


def test_a_mask_of_another_shape_is_refused(triton_device: torch.device) -> None:
    from baton.kernels.sampling import gpu

    none = torch.zeros(1, dtype=torch.int64, device=triton_device)
    for bits in (torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int64)):
        batch = SamplingBatch(seeds=none, positions=none, allowed=AllowedTokens(none, bits.to(triton_device)))
        with pytest.raises(ValueError, match=r"give contiguous int32 \[1, 1\]"):
            gpu.edit_logits(torch.zeros(1, 9, device=triton_device), batch)


def test_a_history_of_another_kind_is_refused(triton_device: torch.device) -> None:
    from baton.kernels.sampling import gpu

    one, none = torch.ones(1, device=triton_device), torch.zeros(1, dtype=torch.int64, device=triton_device)
    history = TokenHistory(torch.zeros(1, 4, dtype=torch.int16, device=triton_device), none, none)
    batch = SamplingBatch(seeds=none, positions=none, penalties=Penalties(none, one, one, one), history=history)
    with pytest.raises(ValueError, match=r"token_ids is torch\.int16"):
        gpu.edit_logits(torch.zeros(1, 9, device=triton_device), batch)


def test_masks_compile_for_an_h200() -> None:
    pytest.importorskip("triton")
    from baton.kernels.sampling.gpu import logit_edits

    signature = {"rows_ptr": "*i64", "bits_ptr": "*i32", "logits_ptr": "*fp32"}
    numbers = {"num_words": "i32", "logits_stride": "i32:16", "vocab_size": "i32:16"}
    compiled = compile_for_h200(logit_edits.keep_allowed_kernel, {**signature, **numbers}, {})
    assert "ld.global.f32" not in compiled.ptx, "the kernel must write logits without reading them"


@pytest.mark.gpu
def test_masked_rows_may_start_beyond_four_gibibytes() -> None:
    from baton.kernels.sampling.gpu.logit_edits import keep_allowed

    stride = 2**30 + 64  # elements: the third row starts beyond 2**31 of them
    logits = torch.zeros(2 * stride + 300, device="cuda").as_strided((3, 300), (stride, 1))
    bits = torch.zeros(1, 10, dtype=torch.int32, device="cuda")
    bits[0, 0] = 1 << 7
    keep_allowed(logits, AllowedTokens(torch.tensor([2], device="cuda"), bits))
    assert logits[2].isneginf().sum() == 299
    assert logits[2, 7] == 0
    assert not logits[:2].any()


@pytest.mark.gpu
def test_histories_may_start_beyond_four_gibibytes() -> None:
    from baton.kernels.sampling import gpu

    capacity = 2**28 + 16
    table = torch.zeros(5, capacity, dtype=torch.int32, device="cuda")
    table[4, :3] = torch.tensor([7, 9, 7])
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    ones = torch.ones(1, device="cuda")
    batch = SamplingBatch(
        seeds=slots,
        positions=slots + 3,
        penalties=Penalties(slots, ones, ones, ones),
        bad_words=BadWords(slots, torch.tensor([[9, 7, 1]], device="cuda")),
        history=TokenHistory(table, slots + 4, slots),
    )
    edited = gpu.edit_logits(torch.zeros(1, 12, device="cuda"), batch)[0]
    assert edited.tolist() == [0, -math.inf, 0, 0, 0, 0, 0, -3, 0, -2, 0, 0]

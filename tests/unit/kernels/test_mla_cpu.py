"""Latent attention on a CPU: as accurate as the reference, and a decode has the same bits with drafts and without."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from baton.kernels.mla import mla_attention, prepare
from baton.kernels.mla.cpu import TILE

from .mla_cases import BLOCK_SIZE, DEEPSEEK_V2_LITE, LAYER, SCALE, SMALL, Shape, latent_step, padded

CPU = torch.device("cpu")
UNEQUAL = Shape(num_heads=3, rank=40, rope=8, nope=24, value=56)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SMALL, UNEQUAL, DEEPSEEK_V2_LITE], ids=["small", "unequal", "deepseek"])
def test_decodes_drafts_and_chunks_are_as_accurate_as_the_reference(shape: Shape, dtype: torch.dtype) -> None:
    step = latent_step([1, 1, 5, TILE, TILE + 1], [1, 90, 40, 16, 50], CPU, shape=shape, dtype=dtype)
    step.check(step.attend(prepare, mla_attention))


def test_padding_computes_nothing() -> None:
    step = padded(latent_step([1, 1, 1], [5, 33, 16], CPU), 4)
    step.check(step.attend(prepare, mla_attention))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_drafts", [1, 3, TILE - 1])
def test_drafts_change_no_bit_of_the_tokens_before_them(num_drafts: int, dtype: torch.dtype) -> None:
    length, shape = 61, UNEQUAL
    drafted = latent_step([1 + num_drafts, 2], [length + num_drafts, 30], CPU, shape=shape, dtype=dtype)
    whole = drafted.attend(prepare, mla_attention)
    for number in range(1 + num_drafts):
        batch = drafted.batch.plan([1], [length + number], drafted.batch.block_tables[:1], BLOCK_SIZE)
        alone = dataclasses.replace(drafted, q=drafted.q[number : number + 1], batch=batch)
        assert torch.equal(alone.attend(prepare, mla_attention)[0], whole[number])


def test_unwritten_latents_behind_the_tokens_are_not_read() -> None:
    step = latent_step([3], [30], CPU)
    assert step.kv[:, 0, LAYER].isnan().any()
    assert mla_attention(step.q, step.kv, LAYER, step.batch, step.up, scale=SCALE).isfinite().all()

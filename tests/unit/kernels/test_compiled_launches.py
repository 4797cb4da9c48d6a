"""All that a step launches compiles for a GPU, at widths of heads that no other test compiles each kernel for."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from baton.kernels.attention import AttentionRule

from ...helpers.aot import compile_launches
from .kernel_checks import paged_sequences

pytest.importorskip("triton")

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

STEPS = {
    "one short": ([1], [300]),
    "decodes": ([1, 1], [300, 30]),
    "drafts of one": ([4], [300]),
    "drafts": ([4, 2], [300, 30]),
    "few tokens": ([40], [300]),
    "many tokens": ([4000], [4000]),
}


def attend(query_lens: list[int], seq_lens: list[int], dims: tuple[int, int], window: int | None) -> None:
    from baton.kernels.attention.gpu import paged_attention, prepare

    # In the process that compiles: there, too, keys are split over the programs of a whole device.
    sys.modules["baton.kernels.attention.gpu.prefill_split_kv"].multiprocessors = lambda device: 132  # type: ignore[attr-defined]
    head_dim, value_dim = dims
    sequences = paged_sequences(
        query_lens,
        seq_lens,
        head_dim=head_dim,
        value_dim=None if value_dim == head_dim else value_dim,
        dtype=torch.bfloat16,
    )
    q = torch.zeros(sequences.batch.num_tokens, 8, head_dim, dtype=torch.bfloat16)
    batch = replace(sequences.batch, drafted=1 < max(query_lens) <= 4)
    batch = prepare(batch, sequences.kv, num_heads=8, head_dim=head_dim)
    rule = AttentionRule(head_dim**-0.5, window=window, sinks=None if window is None else torch.zeros(8))
    paged_attention(q, sequences.kv, 1, batch, rule, out=None)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("dims", [(192, 128), (128, 128)], ids=str)
def test_attention_compiles(step: str, window: int | None, dims: tuple[int, int]) -> None:
    launched = compile_launches(attend, *STEPS[step], dims, window)
    attends = {
        "one short": "attend_split",
        "decodes": "attend_share",
        "drafts of one": "attend_split",
        "drafts": "attend_share",
        "few tokens": "attend_key_split",
        "many tokens": "attend_tile",
    }
    assert attends[step] in launched


def rotate(dims: tuple[int, int], rotary_dim: int) -> None:
    from baton.kernels.rope_kv.gpu import rope_and_cache

    head_dim, value_dim = dims
    sequences = paged_sequences([4], [30], head_dim=head_dim, value_dim=value_dim, dtype=torch.bfloat16)
    q, k, v = (
        torch.zeros(4, heads, dim, dtype=torch.bfloat16)
        for heads, dim in ((8, head_dim), (2, head_dim), (2, value_dim))
    )
    norm = torch.zeros(head_dim)
    cos_sin = torch.zeros(64, rotary_dim)
    rope_and_cache(q, k, v, cos_sin, sequences.kv, 1, sequences.batch, q_norm=norm, k_norm=norm, eps=1e-6)


@pytest.mark.parametrize("rotary_dim", [64, 192])
def test_rotation_of_keys_wider_than_values_compiles(rotary_dim: int) -> None:
    assert compile_launches(rotate, (192, 128), rotary_dim) == ["rope_and_cache_kernel"]

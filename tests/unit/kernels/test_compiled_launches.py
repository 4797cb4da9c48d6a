"""All launches of a step compile for a GPU, with head dimensions that other tests do not compile each kernel for."""

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

    # This runs in the compiling process, where the device must seem to have 132 multiprocessors for keys to be split.
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


def follow_drafts(per_dim: bool) -> None:
    """Launch the kernels of layers with states for a step of decodes with drafts, at the sizes of Qwen3-Next."""
    from baton.kernels.causal_conv.gpu import causal_conv
    from baton.kernels.gated_delta import DeltaDrafts, Gate
    from baton.kernels.gated_delta.gpu import gated_delta
    from baton.kernels.ssd import SSDDrafts, TimeSteps
    from baton.kernels.ssd.gpu import ssd
    from baton.kernels.state_batch import Replay, StateBatch
    from baton.kernels.step.gpu import replay_states

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    replay = Replay(*(zeros(2, dtype=torch.int32) for _ in range(3)), num_places=7)
    batch = replace(StateBatch.plan([4, 1], [0, 1], [0, 1], decode_tokens=4), replay=replay)
    tables = [zeros(9, dtype=torch.int32) for _ in range(2)]
    replay_states(zeros(9, 4, dtype=torch.int32), *tables, zeros(2, dtype=torch.int32), batch, 512)
    causal_conv(zeros(5, 8192), zeros(8192, 4), zeros(2, 8192, 3), batch, drafts=zeros(14, 8192))
    keys, decays, rate = (32, 128) if per_dim else (16, 128), (32, 128) if per_dim else (32,), torch.zeros(32)
    gate = Gate(zeros(5, *decays), zeros(5, 32), rate, torch.zeros(decays))
    kept = DeltaDrafts(zeros(14, *keys), zeros(14, 32, 128), zeros(14, *decays), zeros(14, 32))
    state = torch.zeros(2, 32, 128, 128)
    gated_delta(zeros(5, *keys), zeros(5, *keys), zeros(5, 32, 128), gate, state, batch, scale=1.0, drafts=kept)
    mamba = SSDDrafts(zeros(14, 32, 64), zeros(14, 8, 128), zeros(14, 32))
    b, c = zeros(5, 8, 128), zeros(5, 8, 128)
    ssd(zeros(5, 32, 64), b, c, TimeSteps(zeros(5, 32), rate), torch.zeros(2, 32, 64, 128), batch, drafts=mamba)


@pytest.mark.parametrize("per_dim", [False, True])
def test_kernels_that_replay_drafts_compile(per_dim: bool) -> None:
    launched = compile_launches(follow_drafts, per_dim)
    assert launched == ["_replay_states", "convolve_decode_kernel", "step_tokens", "step_tokens"]

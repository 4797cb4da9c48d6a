"""Ranks of a model with recurrent states divide its heads, and together compute the same as one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.engine.layers.base import Parameter, Share
from baton.engine.models import load_config, load_model
from baton.engine.parallel.groups import ALL2ALL_BACKENDS, ExpertSpread, ParallelGroups

from ...helpers.checkpoints import write_checkpoint
from ...helpers.paged import chunked_logprobs, random_tokens
from ...helpers.thread_groups import run_ranks

HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
MODELS = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), HEADS),
    "kimi_linear": {"linear_num_heads": 4},
}
MAMBA: dict[str, tuple[str, dict[str, object]]] = {
    "bamba": ("bamba", {}),
    "bamba, one group": ("bamba", {"mamba_n_groups": 1, "mamba_proj_bias": True}),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1, gate first": ("falcon_h1", {"mamba_norm_before_gate": False, "mamba_n_groups": 1}),
    "falcon_h1, no norm": ("falcon_h1", {"mamba_rms_norm": False, "mamba_n_groups": 1}),
    "granitemoehybrid": ("granitemoehybrid", {"mamba_n_groups": 4}),
    "granitemoehybrid, dense": ("granitemoehybrid", {"num_local_experts": 0, "mamba_n_groups": 1}),
    "nemotron_h": ("nemotron_h", {"n_groups": 4}),
    "nemotron_h, no latents": ("nemotron_h", {"moe_latent_size": None, "use_bias": True}),
}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("architecture", MODELS)
def test_a_divided_model_gives_the_logprobs_of_the_whole_one(
    architecture: str, load_format: str, ranks: int, tmp_path: Path
) -> None:
    check_divided(write_checkpoint(tmp_path / "model", architecture, **MODELS[architecture]), load_format, ranks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MAMBA)
def test_ranks_divide_heads_of_mamba_and_share_groups_that_are_fewer(name: str, ranks: int, tmp_path: Path) -> None:
    architecture, keys = MAMBA[name]
    check_divided(write_checkpoint(tmp_path / "model", architecture, **keys), "auto", ranks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ALL2ALL_BACKENDS)
@pytest.mark.parametrize("name", ["granitemoehybrid", "nemotron_h", "nemotron_h, no latents"])
def test_experts_of_hybrids_may_be_spread(name: str, backend: str, tmp_path: Path) -> None:
    architecture, keys = MAMBA[name]
    folder = write_checkpoint(tmp_path / "model", architecture, **keys)
    check_divided(folder, "auto", 2, ExpertSpread(0, backend))


def check_divided(folder: Path, load_format: str, ranks: int, spread: ExpertSpread | None = None) -> None:
    config, tokens = load_config(folder, load_format=load_format), random_tokens(70)
    expected = chunked_logprobs(load_model(config), tokens, 40)

    def work(groups: ParallelGroups) -> torch.Tensor:
        model = load_model(config, groups=groups)
        return chunked_logprobs(model, tokens, 40, rank=groups.tp.rank, num_ranks=groups.tp.size)

    for share in run_ranks(work, tp=ranks, spread=spread):
        torch.testing.assert_close(share, expected, rtol=0, atol=5e-4)


def test_a_share_of_parts_groups_each_part_of_all_items() -> None:
    """Checkpoints of Qwen3-Next are so: queries, keys and values of one key head follow those of the previous head."""
    parameter = Parameter(10, 2)
    parameter.allocate("cpu", torch.float32)
    stored = torch.arange(20.0).view(10, 2)
    parameter.slot("weight", 0, Share.of_parts(Share.all(2), [1, 1, 3])).place(stored)
    assert parameter.data[:, 0].tolist() == [0, 10, 2, 12, 4, 6, 8, 14, 16, 18]
    of_rank = Share.of_parts(Share(1, 1, 2), [1, 1, 3])
    assert (of_rank.size, of_rank.whole) == (5, 10)
    parameter.slot("weight", 2, of_rank).place(stored)
    assert parameter.data[2:7, 0].tolist() == [10, 12, 14, 16, 18]


def test_a_share_of_sections_has_a_slice_of_each() -> None:
    share = Share.of_sections([Share(2, 2, 4), Share(0, 1, 2), Share(3, 3, 6)])
    assert (share.size, share.whole) == (6, 12)
    parameter = Parameter(12, 3)
    parameter.keep(0, share)
    parameter.allocate("cpu", torch.float32)
    stored = torch.arange(36.0).view(12, 3)
    parameter.slot("weight").place(stored)
    assert torch.equal(parameter.data, stored[[2, 3, 4, 9, 10, 11]])

"""An EAGLE-3 head drafts at the end of each step.

Answers are those without drafts, and its drafts are those that its tensors give.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine import LLM, EngineConfig, InvalidEngineConfig, SamplingParams
from baton.engine.hf_config.errors import WeightsError
from baton.engine.hf_config.rope import Rope, Rotation
from baton.engine.startup.arenas import engine_caches
from baton.engine.startup.model_config import read_model_config
from baton.engine.startup.weight_counts import weight_bytes_of_rank, weights_of_rank

from ...helpers.checkpoints import make_model, write_checkpoint
from ...helpers.draft_layers import expected_accepted
from ...helpers.eagle3 import HEAD_DIM, THETA, Eagle3Reference, write_eagle3
from .controls import EVERYTHING, GREEDY, WAYS, prompts_of
from .cores import Engines
from .guessing import (
    HOT,
    LIMITS,
    MOST,
    answers,
    check_both_backends,
    check_guesses,
    check_handed_over,
    check_same_answers,
    draft_always,
    stats_of,
)

PROMPTS = prompts_of(1, 17, 33, 40, 56, 90)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eagle3(tmp_path_factory.mktemp("eagle3") / "head")


@pytest.fixture
def make(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    draft_always(monkeypatch)
    return make_llm


def guessing(folder: Path) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": MOST}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("params", [GREEDY, EVERYTHING, HOT], ids=["greedy", "everything", "hot"])
@pytest.mark.parametrize("args", WAYS.values(), ids=WAYS)
def test_answers_are_those_without_a_head(
    llm: LLM, make: Callable[..., LLM], head: Path, params: SamplingParams, args: dict[str, Any]
) -> None:
    check_same_answers(llm, make, PROMPTS, params, speculative_config=guessing(head), **args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("qwen3", {}), ("qwen3", {"norm_before_residual": True}), ("llama", {})],
    ids=["qwen3", "adds to the norm", "llama"],
)
def test_guesses_are_those_that_plain_torch_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, architecture: str, changes: Any
) -> None:
    draft_always(monkeypatch)
    model, folder = write_checkpoint(tmp_path / "model", architecture), write_eagle3(tmp_path / "head", **changes)
    args = {"skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 1, "max_num_batched_tokens": 32}
    drafting = LLM(str(model), **args, speculative_config=guessing(folder))
    reference = Eagle3Reference(folder, make_model(architecture))
    hotter = msgspec.structs.replace(HOT, temperature=6.0)
    found = check_guesses(drafting, PROMPTS[::2], hotter, partial(expected_accepted, reference, most=MOST))
    assert all(found), "random numbers decide most draws, so some guesses are right"
    plain = LLM(str(model), **args)
    assert answers(drafting, PROMPTS, HOT) == answers(plain, PROMPTS, HOT)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("params", [GREEDY, EVERYTHING, HOT], ids=["greedy", "everything", "hot"])
def test_requests_that_were_handed_over_have_drafts_behind_their_first_step(
    llm: LLM, make: Callable[..., LLM], checkpoint: Path, head: Path, params: SamplingParams
) -> None:
    args = {"model": str(checkpoint), "dtype": "float32", "max_num_seqs": 8, "speculative_config": guessing(head)}
    check_handed_over(llm, args, PROMPTS, params)


@pytest.mark.slow
@pytest.mark.parametrize("have_grammars", [False, True], ids=["free", "grammars"])
def test_steps_as_a_gpu_runs_them_guess_the_same(checkpoint: Path, head: Path, have_grammars: bool) -> None:
    args = {"model": str(checkpoint), "dtype": "float32", "max_model_len": 200}
    config = read_model_config(EngineConfig.from_args({**args, "speculative_config": guessing(head)}))
    check_both_backends(Engines(config, LIMITS), PROMPTS, have_grammars=have_grammars)


def read(checkpoint: Path, folder: Path, **args: Any) -> Any:
    given = {"model": str(checkpoint), "speculative_config": guessing(folder), **args}
    return read_model_config(EngineConfig.from_args(given))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures \['LlamaForCausalLM'\] are not an EAGLE-3 head"),
        ({"hidden_size": 128}, "hidden_size is 128, must be 64 for this model"),
        ({"vocab_size": 300}, "vocab_size is 300, must be 256"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, must be 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}}, r"reads layers \[1, 9\], and the model has 3"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false is not supported"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_eagle3(tmp_path / "head", **changes)
    with pytest.raises(InvalidEngineConfig, match=message) as caught:
        read(checkpoint, folder)
    assert caught.value.field == "speculative_config.model"


def test_a_head_rotates_though_layers_of_its_model_do_not(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "smollm3", no_rope_layers=[0, 0, 1])
    config = read(model, write_eagle3(tmp_path / "head")).draft_model
    assert config.rotations == (Rotation(Rope(THETA), HEAD_DIM),)


def test_a_head_that_names_no_layers_reads_an_early_a_middle_and_a_late_one(checkpoint: Path, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head", eagle_config=None)
    assert read(checkpoint, folder).drafted_from == (2, 1, 0)  # of three


@pytest.mark.slow
def test_a_head_knows_all_tokens_where_its_config_names_no_number(
    make: Callable[..., LLM], llm: LLM, tmp_path: Path
) -> None:
    folder = write_eagle3(tmp_path / "head", draft_vocab_size=None)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    for name in ("d2t", "t2d"):
        del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    drafting = make(speculative_config=guessing(folder))
    assert answers(drafting, PROMPTS, HOT) == answers(llm, PROMPTS, HOT)
    assert stats_of(drafting).num_accepted_tokens > 0


def test_a_head_whose_tensors_are_not_all_there_is_refused(make: Callable[..., LLM], tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="1 missing: d2t"):
        make(speculative_config=guessing(folder))


def test_the_plan_counts_the_heads_weights_and_its_part_of_the_cache(checkpoint: Path, head: Path) -> None:
    plain = read_model_config(EngineConfig.from_args({"model": str(checkpoint)}))
    args = {"model": str(checkpoint), "speculative_config": guessing(head)}
    drafting, config = read(checkpoint, head), EngineConfig.from_args(args)
    before = weights_of_rank(plain, config).num_bytes(plain, has_fp8=False)
    added = weight_bytes_of_rank(drafting, config, has_fp8=False) - before
    tensors = load_file(head / "model.safetensors")
    held = sum(each.numel() for name, each in tensors.items() if name not in ("t2d", "d2t"))
    assert added == pytest.approx(4 * held, rel=0.03)
    assert engine_caches(drafting).layout.groups[1].blocks.block_bytes == 2 * 16 * 24 * 4

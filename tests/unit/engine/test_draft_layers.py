"""The model's draft layer drafts at the end of each step.

Answers are those without drafts, and its drafts are those that the checkpoint's tensors give.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine import LLM, SamplingParams
from baton.engine.layers.step_context import RankRows
from baton.engine.models import load_config
from baton.engine.worker.backends.cuda import CudaBackend
from baton.engine.worker.backends.cuda_shapes import CudaShapes
from baton.engine.worker.backends.guesses import HeadGuesser
from baton.engine.worker.warmup import ProfileRun

from ...helpers.draft_layers import DraftReference, expected_accepted, num_layers_of, with_draft_layer
from ...helpers.inline_stream import InlineStream
from .controls import EVERYTHING, GREEDY, WAYS, prompts_of
from .cores import Engines
from .guessing import (
    HOT,
    LIMITS,
    MOST,
    answers,
    check_both_backends,
    check_edited_draws,
    check_guesses,
    check_handed_over,
    check_same_answers,
    draft_always,
    stats_of,
)

PROMPTS = prompts_of(1, 15, 16, 17, 48, 90)
KINDS = pytest.mark.parametrize("params", [GREEDY, EVERYTHING, HOT], ids=["greedy", "everything", "hot"])
MTP = {"method": "mtp", "num_speculative_tokens": MOST}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_draft_layer(tmp_path_factory.mktemp("drafting") / "deepseek", "deepseek_v3")


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    draft_always(monkeypatch)

    def make(path: Path = folder, **args: Any) -> LLM:
        small = {"skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 256}
        return LLM(str(path), **{**small, **args})

    return make


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with recurrent states, whose draft layer has attention."""
    return with_draft_layer(tmp_path_factory.mktemp("drafting") / "qwen3_next", "qwen3_next")


@pytest.mark.slow
@pytest.mark.exhaustive
@KINDS
@pytest.mark.parametrize("args", [{}, {"max_num_batched_tokens": 16, "async_scheduling": True}], ids=["", "chunked"])
def test_answers_of_a_model_with_states_are_those_without_a_draft_layer(
    make: Callable[..., LLM], hybrid: Path, params: SamplingParams, args: dict[str, Any]
) -> None:
    stats = check_same_answers(make(hybrid), partial(make, hybrid), PROMPTS, params, speculative_config=MTP, **args)
    assert stats.num_accepted_tokens > 10 or params is not HOT


@pytest.mark.slow
@pytest.mark.exhaustive
@KINDS
@pytest.mark.parametrize("args", WAYS.values(), ids=WAYS)
def test_answers_are_those_without_a_draft_layer(
    make: Callable[..., LLM], params: SamplingParams, args: dict[str, Any]
) -> None:
    check_same_answers(make(), make, PROMPTS, params, speculative_config=MTP, **args)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "prompts"),
    [("deepseek_v3", PROMPTS[::2]), ("glm4_moe", PROMPTS[:4:2])],  # of a longer one, rounding decides a draw
    ids=["deepseek_v3", "glm4_moe"],
)
@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("chunk", [256, 16])
def test_guesses_are_those_that_the_layers_of_transformers_give(
    make: Callable[..., LLM],
    tmp_path: Path,
    architecture: str,
    prompts: list[list[int]],
    params: SamplingParams,
    chunk: int,
) -> None:
    folder = with_draft_layer(tmp_path / "model", architecture)
    reference = DraftReference(folder, architecture)
    drafting = make(folder, speculative_config=MTP, max_num_seqs=1, max_num_batched_tokens=chunk)
    found = check_guesses(drafting, prompts, params, partial(expected_accepted, reference, most=MOST))
    assert all(found) or params is not HOT, "random numbers decide most draws, so some guesses are right"


@pytest.mark.slow
def test_a_layer_that_knows_the_model_is_always_right(make: Callable[..., LLM], folder: Path, tmp_path: Path) -> None:
    """The model's next token depends on the last one only, and the draft layer computes the same function."""
    path, own = tmp_path / "known", num_layers_of("deepseek_v3")
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    draft = f"model.layers.{own}."
    size = len(tensors["model.norm.weight"])
    tensors[f"{draft}eh_proj.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    tensors[f"{draft}enorm.weight"] = torch.ones(size)
    tensors[f"{draft}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for params in (GREEDY, HOT):
        drafting = make(path, speculative_config=MTP)
        assert answers(drafting, PROMPTS, params) == answers(make(path), PROMPTS, params)
        stats = stats_of(drafting)
        assert stats.num_accepted_tokens > 100
        assert stats.acceptance_rate > 0.99, "two norms round otherwise than one, now and then"


@pytest.mark.exhaustive
@pytest.mark.slow
@KINDS
def test_requests_that_were_handed_over_have_drafts_behind_their_first_step(
    make: Callable[..., LLM], folder: Path, params: SamplingParams
) -> None:
    args = {"model": str(folder), "dtype": "float32", "max_num_seqs": 8, "speculative_config": MTP}
    check_handed_over(make(), args, PROMPTS, params)


@pytest.fixture(scope="module")
def engines(folder: Path) -> Engines:
    return Engines(load_config(folder, dtype="float32").with_draft_layers(), LIMITS)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("num_blocks", [64, 20])
@pytest.mark.parametrize("have_grammars", [False, True], ids=["free", "grammars"])
def test_steps_as_a_gpu_runs_them_guess_the_same(
    engines: Engines, have_grammars: bool, num_blocks: int, captured: bool, depth: int
) -> None:
    stats = check_both_backends(
        engines, PROMPTS, num_blocks=num_blocks, captured=captured, depth=depth, have_grammars=have_grammars
    )
    assert stats.speculation is not None
    assert stats.speculation.num_accepted_tokens > 30
    assert stats.num_preemptions > 0 or num_blocks == 64


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("depth", [1, 2])
def test_edited_draws_of_a_gpu_are_checked_against_drafts(engines: Engines, depth: int) -> None:
    check_edited_draws(engines, PROMPTS, depth)


def test_sizes_of_steps_are_warmed_up_with_guesses(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    guessed: list[tuple[int, int]] = []
    guess = HeadGuesser.guess

    def note(head: HeadGuesser, num_seqs: int, num_guesses: int, ranks: RankRows | None) -> None:
        guessed.append((num_seqs, num_guesses))
        guess(head, num_seqs, num_guesses, ranks)

    monkeypatch.setattr(HeadGuesser, "guess", note)
    shapes = CudaShapes(LIMITS, max_tokens=32)
    backend = CudaBackend(InlineStream(), shapes, torch.float32)
    captured = list(shapes.in_capture_order())
    ProfileRun(lambda: engines.runner(backend, 4), captured, lambda work: work() or 0, LIMITS).run()
    assert {(shape.num_seqs, MOST) for shape in captured} <= set(guessed)

"""MiMo-V2-Flash's three draft layers draft one token each.

Answers are those without drafts, and drafts are those of a plain torch reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.engine import LLM, EngineConfig, InvalidEngineConfig, SamplingParams
from baton.engine.core.layout import CacheKind
from baton.engine.models import load_config, make_model
from baton.engine.startup.model_config import read_model_config
from baton.engine.startup.weight_counts import weights_of_rank

from ...helpers.mimo_draft_layers import NUM_LAYERS, MimoReference, write_mimo
from .controls import EVERYTHING, GREEDY, prompts_of
from .cores import Engines
from .guessing import (
    HOT,
    LIMITS,
    check_both_backends,
    check_edited_draws,
    check_guesses,
    check_handed_over,
    check_same_answers,
    draft_always,
)

PROMPTS = prompts_of(1, 15, 17, 33, 56, 90)
MTP = {"method": "mtp", "num_speculative_tokens": NUM_LAYERS}
SMALL: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mimo(tmp_path_factory.mktemp("drafting") / "mimo")


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    draft_always(monkeypatch)
    return lambda **args: LLM(str(folder), skip_tokenizer_init=True, **{**SMALL, **args})


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("most", [1, NUM_LAYERS])
def test_guesses_are_those_that_plain_torch_gives(
    make: Callable[..., LLM], folder: Path, params: SamplingParams, most: int
) -> None:
    reference = MimoReference(folder)
    drafting = make(speculative_config={**MTP, "num_speculative_tokens": most}, max_num_seqs=1)
    found = check_guesses(drafting, PROMPTS, params, partial(reference.accepted, most=most))
    assert all(found) or params is not HOT, "random numbers decide most draws, so some guesses are right"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "args"),
    [
        (EVERYTHING, {"async_scheduling": True}),
        (HOT, {"max_num_batched_tokens": 16}),
        (GREEDY, {"num_gpu_blocks_override": 16}),
    ],
    ids=["two in flight", "chunked", "preempted"],
)
def test_answers_are_those_without_draft_layers(
    make: Callable[..., LLM], params: SamplingParams, args: dict[str, Any]
) -> None:
    check_same_answers(make(), make, PROMPTS, params, speculative_config=MTP, **args)


@pytest.mark.slow
def test_requests_that_were_handed_over_have_drafts_behind_their_first_step(
    make: Callable[..., LLM], folder: Path
) -> None:
    here = check_handed_over(make(), {"model": str(folder), **SMALL, "speculative_config": MTP}, PROMPTS, HOT)
    assert all(here.num_accepted_per_pos)


@pytest.fixture(scope="module")
def engines(folder: Path) -> Engines:
    return Engines(
        dataclasses.replace(load_config(folder, dtype="float32").with_draft_layers(), window_caches=True), LIMITS
    )


@pytest.mark.slow
def test_edited_draws_of_a_gpu_are_checked_against_drafts(engines: Engines) -> None:
    stats = check_edited_draws(engines, PROMPTS, depth=2)
    assert stats.num_accepted_per_pos[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("have_grammars", [False, True], ids=["free", "grammars"])
def test_steps_as_a_gpu_runs_them_guess_the_same(engines: Engines, have_grammars: bool) -> None:
    stats = check_both_backends(engines, PROMPTS, have_grammars=have_grammars)
    assert stats.speculation is not None
    assert all(stats.speculation.num_accepted_per_pos)


def test_draft_layers_are_layers_of_the_windows_group_and_their_weights_are_counted(folder: Path) -> None:
    config = EngineConfig.from_args({"model": str(folder), "speculative_config": MTP})
    plain, drafting = read_model_config(EngineConfig.from_args({"model": str(folder)})), read_model_config(config)
    assert plain.identity == drafting.identity
    for before, after in zip(plain.caches.groups, drafting.caches.groups, strict=True):
        more = range(plain.num_layers, plain.num_layers + NUM_LAYERS) if after.kind is CacheKind.WINDOW else ()
        assert after.layers == (*before.layers, *more)
    counted = weights_of_rank(drafting, config)
    held = sum(slot.num_elements for slot in make_model(drafting).slots())
    assert counted.plain + counted.narrow == pytest.approx(held, rel=0.02)


def test_more_guesses_than_layers_are_refused(folder: Path) -> None:
    args = {"model": str(folder), "speculative_config": {**MTP, "num_speculative_tokens": NUM_LAYERS + 1}}
    with pytest.raises(
        InvalidEngineConfig, match="is 4, must be at most 3: each of the model's draft layers"
    ) as caught:
        read_model_config(EngineConfig.from_args(args))
    assert caught.value.field == "speculative_config.num_speculative_tokens"

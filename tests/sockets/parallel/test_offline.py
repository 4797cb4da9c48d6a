"""`LLM(data_parallel_size=2)` spreads requests over ranks, and answers as one rank does."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine import LLM, InvalidPrompt, SamplingParams
from baton.engine.core.engine import EngineFailed
from baton.engine.parallel import GroupFailed

from ...helpers.checkpoints import write_checkpoint
from ...helpers.local_member_processes import SOON_S, assert_members_end, cpu_seconds, members

pytestmark = pytest.mark.slow

PROMPTS = [[3 + (i * 37 + 11 * p * p) % 250 for p in range(5 + 9 * i)] for i in range(6)]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=4 + 5 * i, ignore_eos=True, n=1 + i % 2) for i in range(6)]
EXPERTS = {"enable_expert_parallel": True}
REVIEWS = {"enable_eplb": True, "num_redundant_experts": 4, "eplb_step_interval": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("mixture"), "qwen3_moe", num_hidden_layers=2, num_experts=8, num_experts_per_tok=3
    )


@pytest.fixture
def make(folder: Path) -> Callable[..., LLM]:
    def make(**args: Any) -> LLM:
        small = {"skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 32}
        return LLM(str(folder), **{**small, "num_threads": 1, "max_model_len": 128, **args})

    return make


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    assert_members_end()


def tokens(llm: LLM) -> list[list[list[int]]]:
    return [[output.token_ids for output in result.outputs] for result in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    with LLM(str(folder), skip_tokenizer_init=True, device="cpu", max_model_len=128) as alone:
        return tokens(alone)


@pytest.mark.parametrize(
    ("tp", "changes"),
    [
        pytest.param(1, {}, id="apart", marks=pytest.mark.exhaustive),
        pytest.param(2, {}, id="pairs apart", marks=pytest.mark.exhaustive),
        pytest.param(1, {**EXPERTS, "all2all_backend": "all_to_all"}, id="together"),
        pytest.param(2, {**EXPERTS, **REVIEWS}, id="pairs that move experts", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_answer_as_one_engine_repeatedly(
    tp: int, changes: dict[str, Any], make: Callable[..., LLM], expected: list[list[list[int]]]
) -> None:
    with make(tensor_parallel_size=tp, data_parallel_size=2, **changes) as llm:
        assert len(members()) == 2 * tp - 1
        assert tokens(llm) == expected
        with pytest.raises(InvalidPrompt, match="128"):
            llm.generate([PROMPTS[0], PROMPTS[1], [5] * 128], use_tqdm=False)
        assert tokens(llm) == expected
        assert llm.engine.core.stats().generation_tokens > 0
        review = llm.engine.core.stats().experts
        assert (review is not None) == bool(changes)
        assert review is None or (review.num_moves > 0) == ("enable_eplb" in changes)


def test_ranks_without_requests_use_hardly_any_cpu_time_and_are_not_waited_for(
    make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the start are deleted once all ranks are connected, so a killed process cannot leave any."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with make(data_parallel_size=2, **EXPERTS) as llm:
        assert list(tmp_path.glob("baton-*")) == []
        tokens(llm)
        pids = [os.getpid(), *members()]
        before = cpu_seconds(pids)
        time.sleep(1.0)
        assert cpu_seconds(pids) - before < 0.05
        monkeypatch.setattr("baton.engine.offline.data_parallel.zmq.select", lambda *_: pytest.fail("waited"))
        (result,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(result.outputs[0].token_ids) == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes", [pytest.param({}, id="apart", marks=pytest.mark.slow), pytest.param(EXPERTS, id="together")]
)
@pytest.mark.parametrize("busy", [True, False], ids=["in a step", "between requests"])
def test_a_rank_that_dies_ends_the_engine_soon(busy: bool, changes: dict[str, Any], make: Callable[..., LLM]) -> None:
    llm = make(data_parallel_size=2, **changes)
    tokens(llm)
    (victim,) = members()
    if busy:
        threading.Timer(0.05, lambda: os.kill(victim, signal.SIGKILL)).start()
    else:
        os.kill(victim, signal.SIGKILL)
    begun = time.monotonic()

    def generate_for_ever() -> None:
        while True:
            tokens(llm)

    with pytest.raises((EngineFailed, GroupFailed)):
        generate_for_ever()
    assert time.monotonic() - begun < SOON_S
    llm.close()

"""A draft layer whose experts are spread over data-parallel ranks: answers equal those of one rank without drafts, and
guesses those of one rank with drafts, independent of the requests of other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.engine.core.lockstep import EMPTY_STEP
from baton.engine.parallel.groups import ALL2ALL_BACKENDS, ExpertSpread

from ...helpers.draft_layers import with_draft_layer
from .thread_engines import REQUESTS, ThreadEngines, prompt, request

pytestmark = pytest.mark.slow

MOST = 3
# Hot requests have a high temperature: random numbers decide most of their draws, so some guesses are right.
ASKED = [*REQUESTS, *(request(f"hot {seed}", prompt(9 + seed, seed), 30, temperature=1.5) for seed in range(2))]
# The requests of each data-parallel rank. Requests of both ranks end at different times, with steps in flight.
SHARES = {"both": (ASKED[::2], ASKED[1::2]), "one is idle": ([], ASKED)}
DEVICES = {"cpu": None, "gpu, eager": 0, "gpu, captured": 24}
GATHERED, SENT = ALL2ALL_BACKENDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_draft_layer(tmp_path_factory.mktemp("drafting") / "model", "deepseek_v3")


def answers_of(engines: ThreadEngines) -> dict[str, list[int]]:
    return {each.request_id: engines.wait(each.request_id) for each in ASKED}


def accepted(engines: ThreadEngines) -> list[int]:
    """Return the number of accepted guesses of all ranks, by position."""
    found = [core.stats().speculation for core in engines.cores]
    return [sum(counts) for counts in zip(*(each.num_accepted_per_pos for each in found if each), strict=True)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[int]]:
    """The tokens of all requests on one rank, without drafts."""
    with ThreadEngines(folder) as engines:
        engines.submit(0, *ASKED)
        return answers_of(engines)


@pytest.fixture(scope="module")
def right_alone(folder: Path) -> list[int]:
    with ThreadEngines(folder, num_drafts=MOST, drafting_ranks=[0]) as engines:
        engines.submit(0, *ASKED)
        answers_of(engines)
        return accepted(engines)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("device", "tp", "backend", "share", "drafting"),
    [
        ("cpu", 2, GATHERED, "both", (0, 1)),
        ("cpu", 1, GATHERED, "both", (1,)),
        ("cpu", 1, SENT, "one is idle", (1,)),
        ("gpu, eager", 1, GATHERED, "both", (1,)),
        ("gpu, eager", 1, SENT, "one is idle", (0, 1)),
        ("gpu, captured", 1, SENT, "both", (1,)),
        ("gpu, captured", 1, GATHERED, "one is idle", (1,)),
    ],
)
def test_answers_are_those_without_drafts(
    folder: Path,
    alone: dict[str, list[int]],
    right_alone: list[int],
    device: str,
    tp: int,
    backend: str,
    share: str,
    drafting: Sequence[int],
) -> None:
    with ThreadEngines(
        folder,
        tp=tp,
        dp=2,
        spread=ExpertSpread(0, backend),
        depth=2,
        captured_tokens=DEVICES[device],
        num_drafts=MOST,
        drafting_ranks=drafting,
    ) as engines:
        for rank, requests in enumerate(SHARES[share]):
            engines.submit(rank, *requests)
        assert answers_of(engines) == alone
    right = accepted(engines)
    assert all(right), "some guesses of every position must be right"
    if all(rank in drafting for rank, requests in enumerate(SHARES[share]) if requests):
        assert right == right_alone
    idle, _ = (runner.plans for runner in engines.runners)
    idle_guesses = [plan for plan in idle if plan.step == EMPTY_STEP and plan.group and plan.group.num_guesses]
    assert idle_guesses or share == "both"
    for runner in engines.device_runners:
        assert runner.captured.num_replays > 0

"""A soak succeeds on a correct engine, and reports what broke on a faulty one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from baton.engine.offline import soak as module
from baton.engine.offline.soak import SoakFailed, soak

pytestmark = pytest.mark.slow

DEMO = str(Path(__file__).parents[3] / "configs" / "demo" / "model")
SMALL = {"load_format": "dummy", "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def test_everything_is_answered_and_given_back() -> None:
    steps = itertools.count()  # serves as the clock: a busy machine takes as many steps as an idle one
    args = {**SMALL, "num_gpu_blocks_override": 24, "device": "cpu"}
    result = soak(DEMO, seconds=500, seed=3, engine_args=args, clock=lambda: next(steps))
    assert result["completed"] > 10
    assert result["aborted"] > 0
    assert result["num_preemptions"] > 0
    assert result["prefix_cache_hits"] > 0


def test_blocks_that_stay_away_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "build_engine", _leaking(module.build_engine))
    with pytest.raises(SoakFailed, match="1 of 64 blocks were not given back"):
        soak(DEMO, seconds=0.2, engine_args={**SMALL, "num_gpu_blocks_override": 64, "device": "cpu"})


def _leaking(build):  # type: ignore[no-untyped-def]
    def build_with_leak(config):  # type: ignore[no-untyped-def]
        engine = build(config)
        scheduler = engine.core.scheduler
        scheduler.groups[0].pool.allocate(1)
        scheduler.check_idle = lambda: None
        return engine

    return build_with_leak

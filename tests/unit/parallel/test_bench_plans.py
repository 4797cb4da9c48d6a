from __future__ import annotations

import pytest

from baton.engine.offline.bench_plans import BLOCK_TOKENS, decode_plan, main, measure


def test_each_request_takes_a_block_every_so_many_steps() -> None:
    plans = [decode_plan(step, 3) for step in range(2 * BLOCK_TOKENS)]
    for row in range(3):
        assert sum(len(plan.chunks[row].new_block_ids) for plan in plans) == 2


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_plan_is_timed_once() -> None:
    seconds = measure(num_requests=4, num_steps=5, every_s=0.0)
    assert len(seconds) == 5
    assert min(seconds) > 0


def test_invalid_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--steps", "1"])
    assert "--steps at least 2" in capsys.readouterr().err

"""Blocks are restored if that is faster than computing them, by recently measured times."""

from __future__ import annotations

import pytest

from baton.engine.core.kv.restore_cost import FORGOTTEN_S
from baton.engine.core.prefix import block_hashes
from baton.engine.core.step import PendingStep, StepPlan
from baton.engine.core.tiers import Tier

from .core_harness import BLOCK_SIZE, HandClock, Harness, config, request


class TestPays:
    """A prompt of 256 tokens; a tier has all its full blocks but the last."""

    LONG = [(7 * position + 3) % 50 for position in range(257)]

    def measured(
        self, monkeypatch: pytest.MonkeyPatch, *, compute_s: float, restore_s: float, num_on_disk: int = 0
    ) -> Harness:
        """Make an engine that measured these times for computing and for restoring the prompt."""
        clock = HandClock()
        sizes = config(num_blocks=600, max_num_batched_tokens=300, max_model_len=400)
        engine = Harness(sizes, min_restored_tokens=1, clock=clock)
        assert engine.tiers is not None
        launch = engine.runner.launch

        def launch_slowly(plan: StepPlan) -> PendingStep:
            clock.now_s += compute_s * plan.num_tokens / len(self.LONG)
            return launch(plan)

        monkeypatch.setattr(engine.runner, "launch", launch_slowly)
        engine.add(request("first", self.LONG, max_tokens=1))
        engine.run()
        self.drain(engine)
        for name in block_hashes(self.LONG, BLOCK_SIZE)[:num_on_disk]:
            engine.tiers.demote(name)
        engine.add(request("second", self.LONG, max_tokens=1))
        engine.run()
        assert engine.tiers.restores, "what is not known is tried"
        clock.now_s += restore_s
        self.drain(engine)
        self.clock = clock
        return engine

    def drain(self, engine: Harness) -> None:
        assert engine.tiers is not None
        engine.tiers.finish_all()
        engine.run_to_the_end()
        while engine.tiers.stores:
            engine.tiers.finish_all()
            engine.run_to_the_end()
        pool = engine.scheduler.groups[0].pool
        pool.release(pool.allocate(pool.num_blocks))

    def test_what_takes_longer_to_restore_than_to_compute_is_computed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = self.measured(monkeypatch, compute_s=0.1, restore_s=0.2)
        assert engine.tiers is not None
        engine.add(request("a", self.LONG, max_tokens=1))
        engine.run()
        assert engine.tiers.restores == {}
        assert engine.is_answered("a")

    def test_a_slow_disk_says_nothing_of_the_hosts_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = self.measured(monkeypatch, compute_s=0.1, restore_s=0.2, num_on_disk=64)
        assert engine.tiers is not None
        engine.add(request("a", self.LONG, max_tokens=1))
        engine.run()
        assert engine.tiers.restores == {}
        engine.tiers.keep({name: [0] * BLOCK_SIZE for name in block_hashes(self.LONG[1:], BLOCK_SIZE)})
        engine.add(request("b", self.LONG[1:], max_tokens=1))
        engine.run()
        assert len(engine.tiers.restores) == 1

    def test_what_each_tier_takes_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = self.measured(monkeypatch, compute_s=0.257, restore_s=0.352, num_on_disk=32)
        assert engine.tiers is not None
        assert engine.tiers.copy_s == {Tier.HOST: 1.0, Tier.DISK: 10.0}
        stats = engine.core.stats().tiers
        assert stats is not None
        assert stats.restore_s == pytest.approx({"host": 0.001, "disk": 0.01})
        assert stats.compute_s == pytest.approx(0.001 * BLOCK_SIZE)
        assert (stats.min_tokens, stats.answers) == (1, True)
        self.clock.now_s += FORGOTTEN_S + 1
        stats = engine.core.stats().tiers
        assert stats is not None
        assert (stats.restore_s, stats.compute_s) == ({}, 0.0)

    def test_it_is_tried_again_when_that_was_long_ago(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = self.measured(monkeypatch, compute_s=0.1, restore_s=0.2)
        assert engine.tiers is not None
        self.clock.now_s += FORGOTTEN_S + 1
        engine.add(request("a", self.LONG, max_tokens=1))
        engine.run()
        assert engine.tiers.restores

    def test_a_tier_that_was_slow_is_tried_by_one_request_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = self.measured(monkeypatch, compute_s=0.1, restore_s=0.2)
        assert engine.tiers is not None
        self.clock.now_s += FORGOTTEN_S + 1
        engine.add(request("a", self.LONG, max_tokens=1))
        engine.run()
        engine.tiers.keep({name: [0] * BLOCK_SIZE for name in block_hashes(self.LONG[1:], BLOCK_SIZE)})
        engine.add(request("b", self.LONG[1:], max_tokens=1))
        engine.run()
        assert len(engine.tiers.restores) == 1
        assert engine.is_answered("b")

    def test_what_is_restored_sooner_is_restored_unless_it_would_wait_for_others_too_long(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = self.measured(monkeypatch, compute_s=0.15, restore_s=0.1)
        assert engine.tiers is not None
        engine.add(request("a", self.LONG, max_tokens=1))
        engine.run()
        assert len(engine.tiers.restores) == 1
        engine.tiers.keep({name: [0] * BLOCK_SIZE for name in block_hashes(self.LONG[1:], BLOCK_SIZE)})
        engine.add(request("b", self.LONG[1:], max_tokens=1))
        engine.run()
        assert len(engine.tiers.restores) == 1, "a's would come first"
        assert engine.is_answered("b")

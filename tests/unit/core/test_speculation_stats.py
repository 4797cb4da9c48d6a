"""Drafts are counted as vLLM counts them."""

from __future__ import annotations

import msgspec

from baton.engine.core.speculation.stats import SpeculationCounter, SpeculationStats


def test_drafts_are_counted_by_position() -> None:
    counter = SpeculationCounter(most_drafts=4)
    assert counter.stats() == SpeculationStats(0, 0, 0, [0, 0, 0, 0])
    for num_drafts, num_accepted in ((4, 2), (2, 2), (3, 0), (0, 0), (4, 4)):
        counter.settled(num_drafts, num_accepted)
    stats = counter.stats()
    assert stats == SpeculationStats(4, 13, 8, [3, 3, 1, 1])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=SpeculationStats) == stats
    assert stats.acceptance_rate == 8 / 13
    assert stats.mean_length == 3.0


def test_there_are_figures_before_the_first_draft() -> None:
    assert (SpeculationStats().acceptance_rate, SpeculationStats().mean_length) == (0.0, 1.0)

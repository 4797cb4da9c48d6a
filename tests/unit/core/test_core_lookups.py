"""Prefixes are looked up once an admission, and what a request has computed is counted in one file."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

import baton.engine
from baton.engine.core.config import CacheGroupConfig
from baton.engine.core.kv.cache_groups import make_groups
from baton.engine.core.kv.request_memory import GroupHit, RequestMemory
from baton.engine.core.messages import EngineRequest
from baton.engine.core.prefix import BlockHash
from baton.engine.core.requests.request import FinishRule, Request
from baton.engine.core.stages import Stages

from .core_harness import BLOCK_SIZE, Harness, config, request


def tokens(value: int, num_tokens: int) -> list[int]:
    return [value] * num_tokens


def lookups_of(engine: Harness, monkeypatch: pytest.MonkeyPatch) -> Counter[BlockHash]:
    """Count the pool's lookups from now on, by the last hash of the chain, which identifies the prompt."""
    counts: Counter[BlockHash] = Counter()
    find = engine.scheduler.groups[0].pool.find_prefix

    def counted(hashes: Sequence[BlockHash]) -> list[int]:
        if hashes:
            counts[hashes[-1]] += 1
        return find(hashes)

    monkeypatch.setattr(engine.scheduler.groups[0].pool, "find_prefix", counted)
    return counts


@pytest.mark.parametrize("min_restored_tokens", [None, 1], ids=["no tiers", "tiers"])
def test_each_admitted_request_is_looked_up_once(
    monkeypatch: pytest.MonkeyPatch, min_restored_tokens: int | None
) -> None:
    """In several steps: a long prompt, short ones beside it, a higher priority, a first request that does not fit."""
    sizes = config(num_blocks=40, max_num_batched_tokens=32, max_model_len=96, max_num_seqs=8)
    engine = Harness(sizes, min_restored_tokens=min_restored_tokens)
    counts = lookups_of(engine, monkeypatch)
    asked: list[EngineRequest] = []

    def ask(*requests: EngineRequest) -> None:
        asked.extend(requests)
        engine.add(*requests)

    ask(request("long", tokens(1, 60), max_tokens=4))
    engine.step()
    ask(*(request(f"short {value}", tokens(value, 2 * BLOCK_SIZE), max_tokens=8) for value in range(2, 6)))
    engine.step(2)
    ask(request("first", tokens(6, 3 * BLOCK_SIZE), priority=-1, max_tokens=3))
    ask(request("big", tokens(7, 70), max_tokens=2), request("behind", tokens(8, 30), max_tokens=2))
    engine.run_to_the_end()
    assert all(engine.is_answered(each.request_id) for each in asked)
    assert engine.core.stats().num_preemptions == 0, "one that is admitted twice is looked up twice"
    assert sorted(counts.values()) == [1] * len(asked)


@pytest.mark.parametrize("num_tokens", [4 * BLOCK_SIZE, 18 * BLOCK_SIZE], ids=["fits", "is too large"])
def test_blocks_of_lower_priorities_are_not_looked_at_where_they_do_not_matter(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room without them, but not in the step; or there would not even be if they were all free."""
    engine = Harness(config(num_blocks=24, max_num_batched_tokens=16))
    engine.add(request("equal", tokens(1, 8 * BLOCK_SIZE), max_tokens=20, priority=-1))
    engine.add(request("lower", tokens(2, 4 * BLOCK_SIZE), max_tokens=20))
    engine.step(5)
    assert engine.core.stats().num_requests_running == 2
    engine.add(request("head", tokens(3, num_tokens), max_tokens=1, priority=-1))
    looked_at: list[int] = []
    pool = engine.scheduler.groups[0].pool
    references = pool.references
    monkeypatch.setattr(pool, "references", lambda block: looked_at.append(block) or references(block))
    engine.core.step()
    assert engine.core.stats().num_preemptions == 0
    assert not looked_at


def test_a_head_that_does_not_fit_is_looked_up_once_in_the_pool_and_not_in_the_tiers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Harness(config(num_blocks=20, max_num_batched_tokens=64), min_restored_tokens=1)
    assert engine.tiers is not None
    engine.add(request("runs", tokens(1, 12), max_tokens=8 * BLOCK_SIZE))
    engine.step()
    counts = lookups_of(engine, monkeypatch)
    asked_of_tiers: list[int] = []
    find = engine.tiers.find

    def counted(hashes: Sequence[BlockHash], group: int = 0) -> int:
        asked_of_tiers.append(len(hashes))
        return find(hashes, group)

    monkeypatch.setattr(engine.tiers, "find", counted)
    engine.add(request("head", tokens(2, 18 * BLOCK_SIZE), max_tokens=1))
    registered = engine.scheduler.groups[0].pool.num_registered
    engine.step(3 * BLOCK_SIZE)
    assert not engine.is_answered("head")
    assert engine.scheduler.groups[0].pool.num_registered > registered + 1, "meanwhile other blocks become findable"
    assert list(counts.values()) == [1]
    assert asked_of_tiers == []
    engine.run_to_the_end()
    assert engine.is_answered("head")
    assert asked_of_tiers == [17], "once it fits, the tiers are asked"


def test_a_lookup_holds_until_a_block_of_its_own_prefix_comes_or_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = make_groups([CacheGroupConfig(num_blocks=9)], BLOCK_SIZE)
    pool = groups[0].pool
    memory = RequestMemory(groups, BLOCK_SIZE, enable_prefix_caching=True)
    looked_up = []
    find = pool.find_prefix
    monkeypatch.setattr(pool, "find_prefix", lambda hashes: looked_up.append(len(hashes)) or find(hashes))
    length = 2 * BLOCK_SIZE + 1

    def make(asked: EngineRequest) -> Request:
        return Request(asked, FinishRule(asked, config()), 0, Stages())

    first, second = make(request("first", length)), make(request("second", length))
    other = make(request("other", tokens(9, length)))
    assert first.token_ids == second.token_ids
    assert memory.reserve(first)
    assert memory.reserve(other)
    looked_up.clear()
    for _ in range(3):
        assert memory.fits(second)
        assert memory.lookup(second).num_blocks == 0
    other.loaded(length)
    assert memory.register(other)  # blocks of another prompt become findable
    assert memory.lookup(second).num_blocks == 0
    assert looked_up == [2]
    first.loaded(length)
    memory.register(first)  # its two full blocks become findable
    assert memory.lookup(second).hits == [GroupHit(0, first.block_ids[:2])]
    assert memory.lookup(second).num_blocks == 2
    assert looked_up == [2, 2]
    for each in (first, other):
        pool.release(each.give_up_blocks()[0])
    pool.release(pool.allocate(9))  # evicts everything
    assert memory.lookup(second).num_blocks == 0
    assert looked_up == [2, 2, 2]
    assert memory.reserve(second)
    assert looked_up == [2, 2, 2]


def test_what_is_computed_of_a_request_is_counted_by_its_own_file_alone() -> None:
    (folder,) = baton.engine.__path__
    writers = {
        str(path.relative_to(folder))
        for path in Path(folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "num_computed" and isinstance(node.ctx, ast.Store)
    }
    assert writers == {"core/requests/request.py"}

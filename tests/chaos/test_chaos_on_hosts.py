"""Prefill, decode and gateway on a host each, and what happens to hosts. All tests here share one set of hosts."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from faults import Fault, all_faults
from hosts import Hosts, left_over
from load import MODEL, TOKENS, Answerer, Fate, Load, Quiz
from ordeal import DEADLINE_S, STREAMS, Ordeal
from ray_hosts import ENVIRONMENT, HEAD, ROLES, START_S, BatonOnHosts, demo_config
from served import eventually

SEED = 1
QUESTIONS = 32
MIN_ACCURACY = 0.95
ALWAYS = ("decode worker killed", "gateway killed", "link of decode down for 1 s", "raylet of prefill killed")
FAULTS = {fault.name: fault for fault in all_faults(SEED)}

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def baton(machine_with_hosts: None) -> Iterator[BatonOnHosts]:
    with Hosts(HEAD, *ROLES) as hosts, BatonOnHosts(hosts) as baton:
        baton.start(demo_config())
        yield baton
    assert left_over() == []


@pytest.fixture(scope="module")
def quiz(baton: BatonOnHosts) -> Quiz:
    quiz = Quiz(SEED, QUESTIONS)
    assert quiz.learn(Answerer(baton.url, DEADLINE_S), STREAMS) >= MIN_ACCURACY
    return quiz


@pytest.fixture(scope="module")
def ordeal(baton: BatonOnHosts, quiz: Quiz) -> Ordeal:
    return Ordeal(baton, quiz, SEED)


def test_each_part_is_on_its_host_and_blocks_cross_the_cables_by_ucx(baton: BatonOnHosts) -> None:
    for role in ROLES:
        assert baton.rank_of(role)["node_ip"] == baton.hosts[role].ip
    before = baton.hosts["decode"].bytes_received()
    for letter in "xy":  # engines tell their figures with their answers, so the second tells of the first
        body = {"model": MODEL, "prompt": f"{letter} = 1\n" * 300, "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{baton.url}/v1/completions", json=body, timeout=60)
        assert answer.headers["x-baton-path"].startswith("disaggregated")
    moved = baton.metric("baton_kv_transfer_bytes_total")
    assert moved > 2**20, "the prompt's blocks were handed over"
    assert baton.hosts["decode"].bytes_received() - before > moved / 2, "they did not come over its cable"


def test_a_host_without_the_heads_token_does_not_get_into_the_cluster(baton: BatonOnHosts) -> None:
    stranger = baton.hosts["decode"]
    own = {"HOME": "/tmp/stranger", **ENVIRONMENT}
    stranger.run(["mkdir", "-p", "/tmp/stranger/.ray"], timeout_s=10)
    stranger.run(["sh", "-c", "echo 0123456789abcdef0123456789abcdef > /tmp/stranger/.ray/auth_token"], timeout_s=10)
    done = stranger.run(baton.counting_nodes(), timeout_s=START_S, environment=own, check=False)
    assert done.returncode != 0
    assert "nvalid" in done.stderr or "uthentic" in done.stderr, done.stderr
    assert baton.alive_nodes() == 3


def test_a_load_tells_a_wrong_answer_from_a_right_one(baton: BatonOnHosts, quiz: Quiz) -> None:
    other = Quiz(SEED, QUESTIONS)
    other.expected = [text[:-1] + chr(ord(text[-1]) + 1) for text in quiz.expected]
    with Load(Answerer(baton.url, DEADLINE_S), other, streams=2, seed=SEED) as load:
        eventually(lambda: len(load.asked) > 2, DEADLINE_S, "nobody is answered")
    assert set(load.counts()) == {Fate.WRONG}, f"{TOKENS} tokens of another text were taken for right"


@pytest.mark.parametrize("name", ALWAYS)
def test_nothing_is_wrong_hangs_or_is_stranded_when_this_happens_under_load(ordeal: Ordeal, name: str) -> None:
    _endure(ordeal, FAULTS[name])


@pytest.mark.chaos
@pytest.mark.parametrize("name", sorted(set(FAULTS) - set(ALWAYS)))
def test_nothing_is_wrong_hangs_or_is_stranded_when_that_happens_under_load(ordeal: Ordeal, name: str) -> None:
    _endure(ordeal, FAULTS[name])


def _endure(ordeal: Ordeal, fault: Fault) -> None:
    verdict = ordeal.endure(fault)
    print(verdict.line())
    assert verdict.problems == ()
    assert verdict.fates[Fate.RIGHT] > 0

"""Faults of hosts: a gateway on one host, and engines of both roles on two more. All tests here share the hosts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from ..helpers.served import eventually
from ..hosts.hosts import Hosts, left_over
from ..hosts.ray_hosts import ENGINE_HOSTS, ENVIRONMENT, HEAD, ROLES, START_S, WEST, BatonOnHosts, demo_config
from .fault_trial import DEADLINE_S, STREAMS, FaultTrial
from .faults import Fault, all_faults
from .load import MODEL, TOKENS, Answerer, Fate, Load, Quiz

SEED = 1
QUESTIONS = 32
MIN_ACCURACY = 0.95
AT_ONCE = 6
ALWAYS = ("decode worker of west killed", "gateway killed", "link of west down for 1 s", "raylet of east killed")
FAULTS = {fault.name: fault for fault in all_faults(SEED)}

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def baton(machine_with_hosts: None) -> Iterator[BatonOnHosts]:
    with Hosts(HEAD, *ENGINE_HOSTS) as hosts, BatonOnHosts(hosts) as baton:
        baton.start(demo_config())
        yield baton
    assert left_over() == []


@pytest.fixture(scope="module")
def quiz(baton: BatonOnHosts) -> Quiz:
    quiz = Quiz(SEED, QUESTIONS)
    assert quiz.learn(Answerer(baton.url, DEADLINE_S), STREAMS) >= MIN_ACCURACY
    return quiz


@pytest.fixture(scope="module")
def trial(baton: BatonOnHosts, quiz: Quiz) -> FaultTrial:
    return FaultTrial(baton, quiz, SEED)


def test_each_engine_and_what_keeps_it_are_on_their_host(baton: BatonOnHosts) -> None:
    for name in ENGINE_HOSTS:
        assert {rank["role"] for rank in baton.ranks() if rank["node_ip"] == baton.hosts[name].ip} == set(ROLES)
        for role in ROLES:
            assert len(baton.hosts[name].find(f"ray::ServeReplica:baton:{role}")) == 1


def test_blocks_cross_the_cables_by_ucx(baton: BatonOnHosts) -> None:
    before, moved_before = (baton.hosts[WEST].bytes_received(), baton.metric("baton_kv_transfer_bytes_total"))
    decode = baton.rank_of("decode", WEST)
    numbers = itertools.count()

    def ask(number: int) -> None:
        body = {"model": MODEL, "prompt": f"{number} = 1\n" * 300, "max_tokens": 4, "ignore_eos": True}
        headers = {"X-data-parallel-rank": str(decode["rank"])}
        answer = httpx.post(f"{baton.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.headers["x-baton-path"].startswith("disaggregated")

    def crossed() -> bool:
        """Send uncached prompts for west's decode engine, and return whether blocks came from the other host.

        Several at once, and the gateway chooses the prefill engines: for a single prompt, it would always choose the
        one on the same host.
        """
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(ask, itertools.islice(numbers, AT_ONCE)))
        return baton.hosts[WEST].bytes_received() - before > 2**20

    eventually(crossed, DEADLINE_S, "all blocks came from the same host")
    assert baton.metric("baton_kv_transfer_bytes_total") - moved_before > 2**20


def test_a_host_without_the_heads_token_does_not_get_into_the_cluster(baton: BatonOnHosts) -> None:
    stranger = baton.hosts[WEST]
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALWAYS)
def test_nothing_is_wrong_hangs_or_is_stranded_when_this_happens_under_load(trial: FaultTrial, name: str) -> None:
    _run(trial, FAULTS[name])


@pytest.mark.chaos
@pytest.mark.parametrize("name", sorted(set(FAULTS) - set(ALWAYS)))
def test_nothing_is_wrong_hangs_or_is_stranded_when_that_happens_under_load(trial: FaultTrial, name: str) -> None:
    _run(trial, FAULTS[name])


def _run(trial: FaultTrial, fault: Fault) -> None:
    verdict = trial.run(fault)
    print(verdict.line())
    assert verdict.problems == ()
    assert verdict.fates[Fate.RIGHT] > 0

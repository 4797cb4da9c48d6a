"""Processes of `baton serve` die or hang while it serves, with one prefill and one decode engine.

The tests share one server and run in the order of the file.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from ..helpers.served import STEP_TIMEOUT_S, Server, eventually
from .served_pair import ROLES, STREAMS, answer_to, answers, keep_asking, prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]
NOTICED_S = 6.0  # it takes less than a second on an idle machine; hangs and heartbeats take longer than this


async def test_the_directory_may_die_while_engines_serve(client: openai.AsyncOpenAI, server: Server) -> None:
    before = server.ranks()
    os.kill(server.process_named("ray::Directory").pid, signal.SIGKILL)
    expected = await answer_to(client, 1, 24)
    for _ in range(20):
        assert await answer_to(client, 1, 24) == expected
        await asyncio.sleep(0.2)
    assert server.ranks() != []
    assert [(rank["engine_id"], rank["rank"]) for rank in server.ranks()] == [
        (rank["engine_id"], rank["rank"]) for rank in before
    ]


OUT_OF_REACH = """
import asyncio, sys, ray
from baton.cluster.membership.directory_client import DirectoryClient

class Stale:
    async def remote(self, *args):
        raise ray.exceptions.ActorUnavailableError("nobody listens there any more", None)

class StaleHandle:
    watch = heartbeat = Stale()

async def ask():
    watch = DirectoryClient("main")
    watch._actor = StaleHandle()
    ranks = {engine.rank for engine in (await watch.watch(0)).engines}
    print(ranks, await watch.call("heartbeat", "nobody"))

ray.init(address=sys.argv[1], log_to_driver=False)
asyncio.run(ask())
"""


def test_a_process_that_missed_where_the_directory_is_reaches_it_all_the_same(server: Server) -> None:
    """A process misses the address that was cut off while Ray announced it."""
    command = [sys.executable, "-c", OUT_OF_REACH, server.gcs_address()]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.strip() == "{0, 1} unknown", done.stderr


RECOVERS = """
import sys, time, ray
from ray import serve

ray.init(address=sys.argv[1], log_to_driver=False)
until_s = time.monotonic() + 60.0
for _ in range(2):  # looks: a controller answers when it has found replicas, and then ends what it cannot recover
    while (found := [each.status.value for each in serve.status().applications.values()]) != ["RUNNING"]:
        assert time.monotonic() < until_s, found
        time.sleep(0.2)
    time.sleep(1.0)
"""


async def test_the_death_of_serves_controller_cuts_no_stream_and_ends_no_process(
    client: openai.AsyncOpenAI, server: Server
) -> None:
    before = server.table()
    stop = asyncio.Event()
    load = asyncio.gather(*(keep_asking(client, number, stop) for number in range(3)))
    controller = server.process_named("ray::ServeController")
    os.kill(controller.pid, signal.SIGKILL)

    def has_successor() -> bool:
        return any(process != controller for process in server.processes_named("ray::ServeController"))

    await asyncio.to_thread(eventually, has_successor, 60.0, "Ray starts no other controller")
    command = [sys.executable, "-c", RECOVERS, server.gcs_address()]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    recovers = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=120, env=environment
    )
    assert recovers.returncode == 0, recovers.stderr
    stop.set()
    results = [result for its_results in await asyncio.wait_for(load, 60.0) for result in its_results]
    assert [result for result in results if isinstance(result, Exception)] == []
    after = server.table()
    for members in ("gateways", "data"):
        assert [member["pid"] for member in after[members]] == [member["pid"] for member in before[members]]


LOG_LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.]\d{3}Z (?P<level>[A-Z]+) (?P<name>\S+)( \[(?P<request>\S+)\])? (?P<message>.+)"
)


async def test_the_gateways_log_tells_of_each_failed_attempt(client: openai.AsyncOpenAI, server: Server) -> None:
    victim = server.rank_of("decode")
    before = server.counted("baton_request_retries_total", reason="engine-gone")

    async def watched(number: int) -> None:
        stream = await client.completions.create(
            model="baton-demo",
            prompt=prompt_of(number),
            max_tokens=900,
            stream=True,
            extra_headers={"x-request-id": f"watched-{number}"},
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            if not killed.is_set():
                killed.set()
                os.kill(victim["pid"], signal.SIGKILL)

    killed = asyncio.Event()
    await asyncio.gather(*(watched(number) for number in range(8)))
    told = [line for line in server.log_lines("serve/replica_main_gateway_*.log") if "watched-" in line]
    attempts = [line for line in told if " attempt " in line and "engine-gone" in line and victim["engine_id"] in line]
    assert attempts, told
    assert all(LOG_LINE.fullmatch(line) for line in attempts), attempts
    group = f"engine group {victim['group_id']} "
    ends = [line for line in server.log_lines("worker-*.err") if group in line and " is gone: " in line]
    assert [match["name"] for line in ends if (match := LOG_LINE.fullmatch(line))] == ["baton-directory:main"], ends
    assert len(attempts) == server.counted("baton_request_retries_total", reason="engine-gone") - before
    await asyncio.to_thread(server.wait_until_whole, ROLES)


def is_transport_error(result: object) -> bool:
    """Whatever HTTP library OpenAI's client is built on."""
    return any(kind.__name__ == "HTTPError" for kind in type(result).__mro__)


async def test_when_a_gateway_dies_its_requests_are_aborted_and_serve_replaces_it(
    client: openai.AsyncOpenAI, server: Server
) -> None:
    # Long enough that none is over by then: the process is looked for while they run.
    streams = (answer_to(client, number, 3000) for number in range(STREAMS))
    load = asyncio.gather(*streams, return_exceptions=True)
    await asyncio.to_thread(
        eventually,
        lambda: server.rank_of("decode")["stats"]["num_requests_running"] > 4,
        20.0,
        "decode has nothing to do",
    )
    victim = server.process_named("ray::ServeReplica:main:gateway")
    os.kill(victim.pid, signal.SIGKILL)
    results = await asyncio.wait_for(load, 60.0)
    others = [result for result in results if not (isinstance(result, openai.APIError) or is_transport_error(result))]
    assert not others, [repr(result)[:200] for result in others]
    await asyncio.to_thread(server.wait_until_whole, ROLES)
    await asyncio.to_thread(server.wait_until_all_blocks_are_free)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("role", "blow", "noticed_s"),
    [
        *((role, signal.SIGKILL, NOTICED_S) for role in ROLES),
        ("decode", signal.SIGSTOP, STEP_TIMEOUT_S + 2 * NOTICED_S),
    ],
)
async def test_a_worker_that_dies_or_hangs_in_mid_load_costs_no_request_its_end_and_the_fleet_heals(
    client: openai.AsyncOpenAI, server: Server, role: str, blow: signal.Signals, noticed_s: float
) -> None:
    server.wait_until_whole(ROLES)
    expected = await answers(client, STREAMS, 60)
    directory = server.process_named("ray::Directory")
    sockets_before = num_sockets(directory.pid)
    stop = asyncio.Event()
    steps_before = server.rank_of(role)["stats"]["num_steps"]
    load = asyncio.gather(*(keep_asking(client, number, stop) for number in range(STREAMS)))

    def at_work() -> bool:
        return bool(server.rank_of(role)["stats"]["num_steps"] > steps_before + 8)

    await asyncio.to_thread(eventually, at_work, 20.0, f"{role} has nothing to do")
    victim = server.rank_of(role)
    os.kill(victim["pid"], blow)
    killed_s = time.monotonic()

    def noticed() -> bool:
        return victim["epoch"] not in [rank["epoch"] for rank in server.ranks()]

    await asyncio.to_thread(eventually, noticed, noticed_s, "the dead engine is still listed")
    shown = f'"{victim["engine_id"]}"'  # until the processes that are asked are those that are listed
    await asyncio.to_thread(
        eventually, lambda: shown not in httpx.get(f"{server.url}/metrics").text, 10.0, "the dead engine has metrics"
    )
    await asyncio.to_thread(server.wait_until_whole, ROLES)
    healed_s = time.monotonic() - killed_s
    stop.set()
    results = await asyncio.wait_for(load, 60.0)
    for number, its_results in enumerate(results):
        for result in its_results:
            assert isinstance(result, openai.APIError) or result == expected[number], f"request {number}: {result!r}"
    await asyncio.to_thread(server.wait_until_all_blocks_are_free)
    assert await answers(client, 4, 60) == expected[:4]
    outcomes = [isinstance(result, openai.APIError) for its_results in results for result in its_results]
    assert sum(outcomes) <= len(outcomes) / 10, "the retry policy saves next to no request"
    await asyncio.to_thread(
        eventually,
        lambda: num_sockets(directory.pid) <= sockets_before,
        30.0,
        "it keeps sockets of the dead",
    )
    print(f"{role} {blow.name}: {sum(outcomes)} of {len(outcomes)} requests failed, whole again after {healed_s:.1f} s")


def num_sockets(pid: int) -> int:
    return sum(os.readlink(file).startswith("socket:") for file in Path(f"/proc/{pid}/fd").iterdir())

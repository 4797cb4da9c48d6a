"""Processes of `baton serve` with one prefill and one decode engine die or hang while it serves.

At the end another application joins its cluster, and Ctrl-C stops it. The tests share one server, also with those of
`test_end_to_end.py`, and run in the order of the file.
"""

from __future__ import annotations

import asyncio
import json
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
import yaml

from baton.cluster.cli.processes import wait_until_gone

from ..helpers.free_ports import free_port
from ..helpers.served import STEP_TIMEOUT_S, Server, config_file, eventually
from .served_pair import ROLES, STREAMS, answer_to, answers, keep_asking, prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]
NOTICED_S = 6.0  # takes less than a second on an idle machine; timeouts of hangs and heartbeats take longer than this


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
    """The process is cut off while Ray announces the directory's new address."""
    command = [sys.executable, "-c", OUT_OF_REACH, server.gcs_address()]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.strip() == "{0, 1} unknown", done.stderr


OUTLIVES = """
import asyncio, sys, ray
from baton.cluster.contracts import GatewayRecord, Reach
from baton.cluster.logs import LogSettings
from baton.cluster.membership.directory import NAMESPACE, directory_name
from baton.cluster.membership.directory_client import DirectoryClient

async def watch_on():
    directory = DirectoryClient("another")
    await directory.call("cluster_key", LogSettings())
    where = {"node_id": "node", "node_ip": "127.0.0.1", "pid": 1, "host": "127.0.0.1", "port": 1, "reach": Reach()}
    await directory.call("register_gateway", GatewayRecord(identity="lives", **where))
    heard = [await directory.watch(-1)]
    ray.kill(ray.get_actor(directory_name("another"), NAMESPACE), no_restart=False)
    while len(heard) == 1 or not heard[-1].is_complete:
        try:
            snapshot = await directory.watch(heard[-1].version)
        except ray.exceptions.RayError:
            await asyncio.sleep(0.2)
            continue
        if snapshot.version != heard[-1].version:
            heard.append(snapshot)
    ray.kill(ray.get_actor(directory_name("another"), NAMESPACE))
    print([(each.is_complete, [gateway.identity for gateway in each.gateways]) for each in heard])

ray.init(address=sys.argv[1], log_to_driver=False)
asyncio.run(watch_on())
"""


@pytest.mark.exhaustive
def test_members_are_listed_on_while_a_new_directory_may_not_have_heard_from_all(server: Server) -> None:
    command = [sys.executable, "-c", OUTLIVES, server.gcs_address()]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.strip() == "[(True, ['lives']), (False, ['lives']), (True, [])]", done.stderr


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
    """Return whether a request failed on the network, whichever HTTP library OpenAI's client uses."""
    return any(kind.__name__ == "HTTPError" for kind in type(result).__mro__)


async def test_when_a_gateway_dies_its_requests_are_aborted_and_serve_replaces_it(
    client: openai.AsyncOpenAI, server: Server
) -> None:
    victim = server.process_named("ray::ServeReplica:main:gateway")
    begun: asyncio.Queue[int] = asyncio.Queue()
    # Long enough that none has ended when the fifth begins.
    streams = (answer_to(client, number, 3000, begun) for number in range(STREAMS))
    load = asyncio.gather(*streams, return_exceptions=True)
    for _ in range(5):
        await asyncio.wait_for(begun.get(), 20.0)
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
    shown = f'"{victim["engine_id"]}"'  # until the list and the processes asked agree
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("file", "roles", "gateways", "path"),
    [("demo.yaml", ROLES, 1, "disaggregated"), ("unified.yaml", ["unified"] * 2, 2, "unified")],
)
def test_a_serve_config_file_deploys_an_application(
    server: Server, tmp_path: Path, file: str, roles: list[str], gateways: int, path: str
) -> None:
    port = free_port()
    config = config_file(tmp_path, name=path, port=port, like=file)
    described = yaml.safe_load(config.read_text())
    described["applications"][0]["args"]["logging"] = {"format": "json"}
    config.write_text(yaml.safe_dump(described))
    command = [str(Path(sys.executable).parent / "serve"), "run", "--non-blocking", "--address", server.gcs_address()]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    done = subprocess.run(
        [*command, str(config)], capture_output=True, text=True, timeout=120, cwd="/", env=environment
    )
    assert done.returncode == 0, done.stderr
    url = f"http://127.0.0.1:{port}"

    def whole() -> bool:
        table = httpx.get(f"{url}/v1/cluster/ranks").raise_for_status().json()
        roles_reached = sorted(rank["role"] for rank in table["data"] if rank["reachable"])
        return roles_reached == roles and len(table["gateways"]) == gateways

    eventually(whole, 90.0, "the application is not whole")
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(f"{url}/v1/completions", json={"model": model, "prompt": "Hello", "max_tokens": 4}, timeout=30)
    assert answer.headers["x-baton-path"].startswith(path)
    scrapes_of_whichever_gateway_answers_are_alike(url, processes=len(roles) + gateways + 1)
    httpx.get(f"{url}/nowhere", headers={"x-request-id": "lost-1"})
    lines = [json.loads(line) for line in server.log_lines(f"serve/replica_{path}_*.log")]  # Serve's lines, too
    (told,) = (line for line in lines if line.get("request_id") == "lost-1")
    assert (told["component"], told["level"]) == ("gateway", "info")
    assert told["message"].startswith("GET '/nowhere' failed with 404")
    heard = [line for line in server.log_lines("worker-*.err") if f'"name":"baton-directory:{path}"' in line]
    listed = {message for line in heard if "is listed" in (message := json.loads(line)["message"])}
    assert len(listed) == len(roles) + gateways, listed
    server.look()


def scrapes_of_whichever_gateway_answers_are_alike(url: str, processes: int) -> None:
    """Each scrape uses a new connection, so the kernel chooses among gateways that share the port."""
    before: dict[str, float] = {}
    engines: set[str] = set()
    for _ in range(16):
        lines = httpx.get(f"{url}/metrics", timeout=10.0).raise_for_status().text.splitlines()
        now = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
        up = [value for name, value in now.items() if name.startswith("baton_process_up")]
        assert up == [1.0] * processes
        counted = {name: value for name, value in now.items() if name.partition("{")[0].endswith("_total")}
        assert all(counted[name] >= value for name, value in before.items())
        before = counted
        of_engines = {name for name in now if 'engine="' in name}
        engines = engines or of_engines
        assert of_engines == engines
    answered = [name for name in before if name.startswith("baton_http_responses_total") and '"/metrics"' in name]
    num_engines = sum(name.startswith("baton_engine_steps_total") for name in engines)
    assert len(answered) == processes - num_engines - 1, "every gateway was asked"


def test_ctrl_c_leaves_no_process(server: Server) -> None:
    server.look()
    os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: to all foreground processes
    assert server.process.wait(timeout=40) == 130
    assert wait_until_gone(server.seen, 5.0) == []
    assert "every process has ended" in server.output()

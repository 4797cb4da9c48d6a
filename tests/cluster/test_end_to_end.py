"""`baton serve` with one prefill and one decode engine, used as people use it, and hurt as machines hurt it.

The tests of this module share one server and run in the order of the file; the last one ends it.
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
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from baton.cluster.cli.processes import wait_until_gone
from baton.cluster.contracts import Role, StartingGroup
from baton.cluster.gateway.routing.breaker import CircuitState
from baton.cluster.gateway.serving.timeline import Stamp
from baton.engine.core.messages import ExpertReview
from baton.engine.core.speculation.stats import SpeculationStats
from baton.engine.core.tiers import TierStats

from ..helpers.free_ports import free_port
from ..helpers.served import BATON, STEP_TIMEOUT_S, Server, baton_serve, config_file, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

ROLES = ["decode", "prefill"]
STREAMS = 32
MODEL = Path(__file__).parents[2] / "configs/demo/model"
NOTICED_S = 6.0  # it takes less than a second on an idle machine; hangs and heartbeats take longer than this


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    config = config_file(tmp_path_factory.mktemp("config"), name="main", port=port)
    with baton_serve(config, port) as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60.0)


def prompt_of(number: int) -> str:
    """Make a prompt of 20 to 300 tokens, none a prefix of another."""
    return f"# {number}\n" + "def fox(lazy, dog):\n    return lazy + dog\n" * (1 + number % 16)


async def answer_to(client: openai.AsyncOpenAI, number: int, max_tokens: int) -> str:
    """Return the streamed text of a greedy answer."""
    stream = await client.completions.create(
        model="baton-demo",
        prompt=prompt_of(number),
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join([event.choices[0].text async for event in stream if event.choices])


async def answers(client: openai.AsyncOpenAI, count: int, max_tokens: int) -> list[str]:
    return list(await asyncio.gather(*(answer_to(client, number, max_tokens) for number in range(count))))


async def test_the_openai_client_is_answered_through_prefill_and_decode(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="baton-demo",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=8,
        extra_body={"ignore_eos": True},
    )
    assert raw.headers["x-baton-path"].startswith("disaggregated")
    answer = raw.parse()
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


async def test_a_stream_ends_with_its_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="baton-demo",
        prompt="Hello",
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    events = [event async for event in stream]
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 5


NOT_IN_AN_ANSWER = (Stamp.LAST_BYTE, Stamp.FAILED, Stamp.RESUMED)


def test_the_load_generator_measures_the_server(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["--url", server.url, "--num-prompts", "8", "--input-len", "32", "--output-len", "8", "--json", str(file)]
    subprocess.run([BATON, "bench", "serve", "--timeline", *words], check=True, capture_output=True, timeout=60)
    result = json.loads(file.read_text())
    assert result["completed"] == 8
    assert result["failed"] == 0
    assert result["total_output_tokens"] == 64
    assert 0 < result["median_ttft_ms"] < result["median_e2el_ms"]
    assert list(result["median_parts_ms"]) == [stamp for stamp in Stamp if stamp not in NOT_IN_AN_ANSWER]


def test_status_lists_the_engines(server: Server) -> None:
    done = subprocess.run([BATON, "status", "--url", server.url], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert "prefill" in done.stdout
    assert "internal" in done.stdout, "gateways are listed, too"
    assert "ready" in done.stdout


OPERATIONS = Path(__file__).parents[2] / "docs/operate/operations.md"
NO_FIELDS = {Role.UNIFIED, *CircuitState, "list", "null"}  # what the page's table names beside fields


def test_status_tells_programs_every_field_that_the_page_for_operators_names_and_no_other(server: Server) -> None:
    command = [BATON, "status", "--json", "--url", server.url]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    told = json.loads(done.stdout)
    assert told["ready"] is True
    assert sorted((rank["role"], rank["pid"]) for rank in told["data"]) == sorted(
        (rank["role"], rank["pid"]) for rank in server.ranks()
    )
    table = OPERATIONS.read_text().partition("\n## Status\n")[2].partition("\n## ")[0].partition("|")[2]
    sometimes = (ExpertReview, SpeculationStats, StartingGroup, TierStats)
    fields = set(keys_in(told)).union(*(kind.__struct_fields__ for kind in sometimes))
    assert set(re.findall(r"`([a-z_]+)`", table)) - NO_FIELDS == fields


def keys_in(value: Any) -> Iterator[str]:
    """Return the keys of all mappings, at any depth."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from keys_in(part)


CALLS = """
import json, sys
import ray
from ray import serve

ray.init(sys.argv[1], log_to_driver=False)
gateway = serve.get_app_handle("main")
body = {"model": "baton-demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
whole = gateway.chat.remote(body).result(timeout_s=60)["choices"][0]["message"]["content"]
chunks = list(gateway.options(stream=True).stream_chat.remote(body))
text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
try:
    gateway.completions.remote({"model": "baton-demo", "prompt": "x", "temperature": -1}).result(timeout_s=60)
except Exception as error:
    refused = [error.status, error.error["param"]]
print("CALLS", json.dumps([whole, text, refused]))
"""


def test_other_serve_applications_call_the_gateways_through_their_handle(server: Server) -> None:
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-c", CALLS, server.gcs_address()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    told = next(line for line in done.stdout.splitlines() if line.startswith("CALLS "))
    whole, text, refused = json.loads(told.removeprefix("CALLS "))
    assert whole == text != ""
    assert refused == [400, "temperature"]


async def test_an_unknown_field_is_refused_by_name(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperture"):
        await client.completions.create(model="baton-demo", prompt="Hello", extra_body={"temperture": 1})


async def test_an_answer_fits_its_grammar_through_prefill_and_decode(client: openai.AsyncOpenAI) -> None:
    for asked in ({"choice": ["red fox", "lazy dog"]}, {"regex": "[0-9]{4}-[0-9]{2}"}):
        answer = await client.completions.create(
            model="baton-demo", prompt="Hello", max_tokens=40, seed=1, extra_body={"structured_outputs": asked}
        )
        assert answer.choices[0].finish_reason == "stop"
        assert re.fullmatch("red fox|lazy dog|[0-9]{4}-[0-9]{2}", answer.choices[0].text)
    with pytest.raises(openai.BadRequestError, match="cannot be compiled"):
        await client.completions.create(
            model="baton-demo", prompt="Hello", extra_body={"structured_outputs": {"regex": "(a"}}
        )


def test_values_are_recalled_through_prefill_and_decode_at_every_length(server: Server, tmp_path: Path) -> None:
    """The demo model knows the answers; a block that was lost, stale or misplaced on its way makes one wrong."""
    file = tmp_path / "recall.json"
    words = ["--base-url", server.url, "--samples", "10", "--seed", "7", "--json", str(file)]
    done = subprocess.run([BATON, "eval", "recall", *words], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["errors"] == 0
    assert result["accuracy"] >= 0.99, result
    assert all(line["accuracy"] >= 0.95 for line in result["by_length"].values()), result
    handed_over = sum(count for path, count in result["paths"].items() if path.startswith("disaggregated"))
    assert handed_over > 0.8 * sum(result["paths"].values()), "on a busy machine a few prompts are sooner computed anew"


@pytest.mark.parametrize("sampled", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 11, "top_p": 0.9}])
async def test_prefill_and_decode_give_the_tokens_of_one_engine(
    client: openai.AsyncOpenAI, sampled: dict[str, float]
) -> None:
    """The blocks go over NIXL; the engine beside them never leaves this process."""
    from baton.engine import LLM, SamplingParams

    prompts = [prompt_of(number) for number in range(4)]
    alone = LLM(str(MODEL), dtype="float32", num_threads=1, kv_cache_memory_bytes=2**26)
    params = SamplingParams(max_tokens=40, ignore_eos=True, **sampled)
    expected = [alone.generate(prompt, params, use_tqdm=False)[0].outputs[0].text for prompt in prompts]
    for prompt, text in zip(prompts, expected, strict=True):
        answer = await client.completions.create(
            model="baton-demo", prompt=prompt, max_tokens=40, extra_body={"ignore_eos": True, **sampled}
        )
        assert answer.choices[0].text == text


async def test_32_streams_at_once_get_the_answers_that_each_gets_alone(
    client: openai.AsyncOpenAI, server: Server
) -> None:
    alone = [await answer_to(client, number, 24) for number in range(STREAMS)]
    together = await answers(client, STREAMS, 24)
    assert together == alone
    assert len(set(alone)) > 4, "all prompts got much the same answer: mixed up streams would not show"
    server.wait_until_all_blocks_are_free()
    handed_over_early = lambda: server.counted("baton_kv_blocks_read_early_total") > 0  # noqa: E731
    eventually(handed_over_early, 5.0, "no block came before its prompt was read to its end")


async def test_the_blocks_of_clients_that_disconnect_come_back(server: Server) -> None:
    """Some leave in prefill, some in transfer, some in decode."""
    async with httpx.AsyncClient(base_url=server.url, timeout=30.0) as http:

        async def leave_after(number: int) -> None:
            body = {
                "model": "baton-demo",
                "prompt": prompt_of(number),
                "max_tokens": 900,
                "stream": True,
                "ignore_eos": True,
            }
            request: Awaitable[httpx.Response] = http.post("/v1/completions", json=body)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(request, 0.01 + 0.02 * number)

        await asyncio.gather(*(leave_after(number) for number in range(STREAMS)))
    server.wait_until_all_blocks_are_free()


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
    load = asyncio.gather(*(_keep_asking(client, number, stop) for number in range(3)))
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
    load = asyncio.gather(*(_keep_asking(client, number, stop) for number in range(STREAMS)))

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


async def _keep_asking(client: openai.AsyncOpenAI, number: int, stop: asyncio.Event) -> list[str | openai.APIError]:
    """Ask the same again and again; at least once."""
    results: list[str | openai.APIError] = []
    while not results or not stop.is_set():
        try:
            results.append(await answer_to(client, number, 60))
        except openai.APIError as error:
            results.append(error)
            await asyncio.sleep(0.2)
    return results


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
    lines = [json.loads(line) for line in server.log_lines(f"serve/replica_{path}_*.log")]  # Serve's, too
    (told,) = (line for line in lines if line.get("request_id") == "lost-1")
    assert (told["component"], told["level"]) == ("gateway", "info")
    assert told["message"].startswith("GET '/nowhere' failed with 404")
    heard = [line for line in server.log_lines("worker-*.err") if f'"name":"baton-directory:{path}"' in line]
    listed = {message for line in heard if "is listed" in (message := json.loads(line)["message"])}
    assert len(listed) == len(roles) + gateways, listed
    server.look()


def scrapes_of_whichever_gateway_answers_are_alike(url: str, processes: int) -> None:
    """Each scrape is a connection of its own, so the kernel chooses among gateways that share the port."""
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
    os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: to everyone in the foreground
    assert server.process.wait(timeout=40) == 130
    assert wait_until_gone(server.seen, 5.0) == []
    assert "every process has ended" in server.output()

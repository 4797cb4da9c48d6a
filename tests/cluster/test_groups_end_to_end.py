"""`baton serve` with engines of several processes each, some of which get killed.

Two servers, one after the other: a prefill engine and a decode engine on two ranks; then two data-parallel ranks of a
mixture of experts, each behind a gateway of its own, and HAProxy before them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from baton.cluster.cli.processes import Process, descendants, wait_until_gone

from ..helpers.balancer import HAPROXY, Load, answered_by, is_missing, running, wait_until_healthy
from ..helpers.free_ports import free_port
from ..helpers.served import BATON, Server, baton_serve, config_file, eventually
from ..helpers.tiny_shapes import DIFFERENCES, SHAPE

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]
DEMO = Path(__file__).parents[2] / "configs/demo/model"
PROMPTS = ["import os\n\ndef read_file(path):", "# 1\n" + "def fox(lazy):\n    return lazy\n" * 9, "class Dog:"]
ENDED_S = 10.0


def ask(url: str, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> str:
    body = {"model": "baton-demo", "prompt": prompt, "temperature": 0.0, "ignore_eos": True, **fields}
    response = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def alone(model: Path, **args: Any) -> list[str]:
    """Return the answers of a single engine in this process."""
    from baton.engine import LLM, SamplingParams

    llm = LLM(str(model), num_threads=1, kv_cache_memory_bytes=2**26, **args)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    return [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def changed(file: Path, **args: Any) -> Path:
    config = yaml.safe_load(file.read_text())
    application = config["applications"][0]["args"]
    for name, value in args.items():
        application[name] = {**application.get(name, {}), **value} if isinstance(value, dict) else value
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start one prefill engine on one rank and one decode engine on two."""
    port = free_port()
    file = config_file(tmp_path_factory.mktemp("divided"), name="divided", port=port)
    decode = {"replicas": 1, "num_cpus": 0.1, "engine": {"tensor_parallel_size": 2}}
    with baton_serve(changed(file, fleets={"decode": decode}), port) as server:
        yield server


def test_a_hand_off_to_more_ranks_gives_the_tokens_of_one_engine(divided: Server) -> None:
    (decode,) = [rank for rank in divided.ranks() if rank["role"] == "decode"]
    assert len(decode["follower_pids"]) == 1
    assert [ask(divided.url, prompt, max_tokens=40) for prompt in PROMPTS] == alone(DEMO, dtype="float32")
    divided.wait_until_all_blocks_are_free()


def test_ranks_that_lead_and_ranks_that_follow_cost_no_cpu_without_work(divided: Server) -> None:
    pids = [pid for rank in divided.ranks() for pid in (rank["pid"], *rank["follower_pids"])]
    assert len(pids) == 3
    assert cores_taken_by(pids) < 0.1


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["follower", "leader", "starting"])
def test_a_rank_that_dies_ends_its_group_or_its_start_and_the_group_comes_back_as_a_whole(
    divided: Server, victim: str
) -> None:
    if victim == "starting":
        kill_in_a_start(divided)
    else:
        kill_in_a_stream(divided, victim)


def kill_in_a_stream(divided: Server, victim: str) -> None:
    expected = ask(divided.url, PROMPTS[0], max_tokens=300)
    before, prefill = divided.rank_of("decode"), divided.rank_of("prefill")
    group = [process for process in divided.look() if process.pid in (before["pid"], *before["follower_pids"])]
    assert len(group) == 2
    body = {"model": "baton-demo", "prompt": PROMPTS[0], "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    text = ""
    with httpx.stream("POST", f"{divided.url}/v1/completions", json={**body, "stream": True}, timeout=90) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if text and group:
                os.kill(before["follower_pids"][0] if victim == "follower" else before["pid"], signal.SIGKILL)
                assert wait_until_gone(group, ENDED_S) == []
                group = []
    assert text == expected, "the stream went on elsewhere, without a gap"
    divided.wait_until_whole(["decode", "prefill"])
    after = divided.rank_of("decode")
    assert (after["rank"], len(after["follower_pids"])) == (before["rank"], 1)
    assert after["epoch"] != before["epoch"]
    assert divided.rank_of("prefill")["epoch"] == prefill["epoch"], "other groups never notice"
    divided.wait_until_all_blocks_are_free()


def kill_in_a_start(divided: Server) -> None:
    """Kill the group, and then a rank of the one that starts in its place."""
    before, prefill = divided.rank_of("decode"), divided.rank_of("prefill")
    others = [prefill["pid"], before["pid"], *before["follower_pids"]]
    os.kill(before["pid"], signal.SIGKILL)
    starting: list[Process] = []

    def has_begun() -> bool:
        starting[:] = [rank for rank in workers_of(divided) if rank.pid not in others]
        return len(starting) == 2

    eventually(has_begun, 60, "the group is not started again")
    os.kill(starting[1].pid, signal.SIGKILL)
    assert wait_until_gone(starting, ENDED_S) == []
    divided.wait_until_whole(["decode", "prefill"])
    after = divided.rank_of("decode")
    assert (after["rank"], len(after["follower_pids"])) == (before["rank"], 1)
    assert {after["pid"], *after["follower_pids"]}.isdisjoint(rank.pid for rank in starting), "as a whole"
    assert divided.rank_of("prefill")["epoch"] == prefill["epoch"], "other groups never notice"
    assert ask(divided.url, PROMPTS[0], max_tokens=4)


def workers_of(server: Server) -> list[Process]:
    """Return the processes of all ranks, ready or not."""
    found = []
    for process in server.look():
        with contextlib.suppress(OSError):  # it has just ended
            if Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"ray::EngineWorker"):
                found.append(process)
    return found


def test_the_end_leaves_no_process(divided: Server) -> None:
    ends_in_order(divided)


def ends_in_order(server: Server) -> None:
    server.look()
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.process.wait(timeout=60) == 130
    assert wait_until_gone(server.seen, 5.0) == []


def test_a_group_that_cannot_start_is_an_error_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    """The group asks for a resource that no node has."""
    port = free_port()
    file = config_file(tmp_path, name="toolarge", port=port)
    fleets = {"prefill": {"replicas": 1, "resources": {"fast_network": 1}}}
    config = changed(file, fleets=fleets)
    process = subprocess.Popen([BATON, "serve", "--config", str(config)], stderr=subprocess.PIPE, text=True)
    seen: set[Process] = set()
    try:
        eventually(lambda: seen.update(descendants(process.pid)) or process.poll() is not None, 120, "it still tries")
        output = " ".join(process.communicate()[1].split())
    finally:
        process.kill()
    assert process.returncode == 1
    assert "no room for all engines: they reserve 1 fast_network (free 0 of 0)" in output
    assert wait_until_gone(seen, 5.0) == []


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tiny mixture of experts with the demo's tokenizer and random weights."""
    folder = tmp_path_factory.mktemp("mixture")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    keys = {"num_hidden_layers": 2, "num_experts": 8, "vocab_size": 4096, "max_position_embeddings": 1024}
    config = {**SHAPE, **DIFFERENCES["qwen3_moe"], **keys, "architectures": ["Qwen3MoeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return folder


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory, mixture: Path) -> Iterator[Server]:
    """Start two data-parallel ranks with expert parallelism, each behind a gateway of its own."""
    port = free_port()
    file = config_file(tmp_path_factory.mktemp("spread"), name="spread", port=port, like="balanced.yaml")
    engine = {"load_format": "dummy", "data_parallel_size": 2, "enable_expert_parallel": True}
    fleets = {"unified": {"replicas": 1, "num_cpus": 0.1}}
    gateway = {"drain_s": HAPROXY.drain_s, "drain_timeout_s": 10}
    with baton_serve(changed(file, model=str(mixture), engine=engine, fleets=fleets, gateway=gateway), port) as server:
        yield server


def gateways_of(server: Server) -> list[dict[str, Any]]:
    return list(server.table()["gateways"])


def test_each_rank_is_behind_its_own_gateway_and_pinned_there(spread: Server) -> None:
    gateways = gateways_of(spread)
    assert [(gateway["port"], gateway["ranks"]) for gateway in gateways] == [
        (spread.port, [0]),
        (spread.port + 1, [1]),
    ]
    assert {gateway["load_balancing"] for gateway in gateways} == {"external"}
    url = f"http://127.0.0.1:{spread.port + 1}"
    assert ask(url, "x", {"X-data-parallel-rank": "1"}, max_tokens=2)
    refused = httpx.post(
        f"{url}/v1/completions",
        json={"model": "baton-demo", "prompt": "x", "max_tokens": 1},
        headers={"X-data-parallel-rank": "0"},
    )
    assert refused.status_code == 400
    assert "reaches: 1." in refused.json()["error"]["message"]


async def test_ranks_with_and_without_work_give_the_tokens_of_one_engine(spread: Server, mixture: Path) -> None:
    expected = await asyncio.to_thread(alone, mixture, load_format="dummy")
    urls = [f"http://127.0.0.1:{spread.port + index}" for index in range(2)]
    for busy in (urls[:1], urls[1:], urls):
        asked = [asyncio.to_thread(ask, url, prompt, max_tokens=40) for url in busy for prompt in PROMPTS]
        assert await asyncio.gather(*asked) == expected * len(busy)


def test_a_group_without_work_costs_no_cpu(spread: Server) -> None:
    pids = [rank["pid"] for rank in spread.table()["data"]]
    assert len(pids) == 2
    assert cores_taken_by(pids) < 0.1


def cores_taken_by(pids: list[int]) -> float:
    """Return the CPU cores that these processes use; an idle process of Ray takes a hundredth of a core."""
    time.sleep(0.5)
    before_s, began_s = sum(map(cpu_s, pids)), time.monotonic()
    time.sleep(2.0)
    return (sum(map(cpu_s, pids)) - before_s) / (time.monotonic() - began_s)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


DRAIN = """
import sys, ray
ray.init(address=sys.argv[1], namespace="baton", log_to_driver=False)
(name,) = [found["name"] for found in ray.util.list_named_actors(all_namespaces=True)
           if found["name"].startswith("baton-gateway:") and found["name"].endswith("rank-" + sys.argv[2])]
try:
    ray.get(ray.get_actor(name, namespace="baton").drain.remote())
except ray.exceptions.ActorDiedError:
    pass  # its keeper may clear it away before its last word is here
"""


@pytest.mark.skipif(is_missing("haproxy"), reason="HAProxy is not installed")
async def test_behind_haproxy_a_gateway_that_is_taken_away_under_load_costs_no_request(
    spread: Server, tmp_path: Path
) -> None:
    port, gateways = free_port(), [spread.port, spread.port + 1]
    before = gateways_of(spread)
    with running(HAPROXY.runs(HAPROXY.configure(tmp_path, port, gateways)), tmp_path / "haproxy.log"):
        await asyncio.to_thread(wait_until_healthy, port)
        async with Load(port, clients=6, stream=True, model="baton-demo").under_way() as load:
            await asyncio.to_thread(eventually, lambda: answered_by(gateways[1]) > 6, 60, "no load")
            drain = [sys.executable, "-c", DRAIN, spread.gcs_address(), "1"]
            environment = {**os.environ, "RAY_AUTH_MODE": "token"}
            await asyncio.to_thread(subprocess.run, drain, check=True, timeout=120, env=environment)
            answered = load.answered

            def is_back() -> bool:
                return wait_for_new_gateway(spread, before) and answered_by(gateways[1]) > 6

            await asyncio.to_thread(eventually, is_back, 60, "the gateway does not come back")
        assert load.failures == []
        assert load.answered > answered


def wait_for_new_gateway(server: Server, before: list[dict[str, Any]]) -> bool:
    now = gateways_of(server)
    return len(now) == 2 and now[1]["gateway"] != before[1]["gateway"] and now[1]["port"] == before[1]["port"]


def test_a_data_parallel_rank_that_dies_takes_its_group_along_and_gateways_stay(spread: Server) -> None:
    before, gateways = spread.table()["data"], gateways_of(spread)
    group = [process for process in spread.look() if process.pid in [rank["pid"] for rank in before]]
    os.kill(before[1]["pid"], signal.SIGKILL)
    assert wait_until_gone(group, ENDED_S) == []
    assert httpx.get(f"{spread.url}/health").status_code == 503

    def back() -> bool:
        ranks = spread.table()["data"]
        return [rank["rank"] for rank in ranks] == [0, 1] and ranks[0]["epoch"] != before[0]["epoch"]

    eventually(back, 60, "the group does not come back")
    for gateway in gateways:
        wait_until_healthy(gateway["port"])
    assert gateways_of(spread) == gateways


def test_the_end_of_gateways_that_are_kept_leaves_no_process(spread: Server) -> None:
    ends_in_order(spread)

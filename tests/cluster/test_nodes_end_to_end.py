"""Hybrid load balancing over several Ray nodes on one machine: a gateway on each node, and the loss of a node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from baton.cluster.cli.processes import descendants, kill

from .. import ROOT
from ..helpers.free_ports import free_port
from ..helpers.served import Server, baton_serve, config_file, eventually
from . import several_nodes

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

DEMO = Path(__file__).parents[2] / "configs/demo/model"
DECODE_NODES = ["decode_a", "decode_b"]


class Nodes:
    """The process that runs the nodes."""

    def __init__(self) -> None:
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", several_nodes.__name__, *DECODE_NODES],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the cluster did not start"

    def lose(self, name: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        below = descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        kill(below)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def server(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a decode engine on each of two nodes, and a prefill engine with a rank on each."""
    port = free_port()
    file = config_file(tmp_path_factory.mktemp("nodes"), name="nodes", port=port)
    config = yaml.safe_load(file.read_text())
    args = config["applications"][0]["args"]
    args["load_balancing"] = "hybrid"
    args["engine"]["num_threads"] = 1
    # Each decode engine takes most of its node's CPUs, so that each node gets one.
    resources = {"decode_node": 0.001}
    args["fleets"]["decode"] = {"replicas": 2, "num_cpus": 1.5, "resources": resources, "step_timeout_s": 30.0}
    # More than half of the node's amount: each rank gets a node of its own.
    # After a node's loss a rank no longer fits: Serve drains a replica that waits for resources for the whole timeout.
    halves = {"num_cpus": 0.1, "resources": {"decode_node": 0.6}, "step_timeout_s": 30.0, "drain_timeout_s": 3.0}
    args["fleets"]["prefill"] |= halves
    args["fleets"]["prefill"]["engine"]["tensor_parallel_size"] = 2
    file.write_text(yaml.safe_dump(config))
    with baton_serve(file, port, "--address", nodes.address) as server:
        yield server


def table_at(port: int) -> dict[str, Any]:
    return dict(httpx.get(f"http://127.0.0.1:{port}/v1/cluster/ranks", timeout=10).raise_for_status().json())


def test_each_node_that_writes_answers_has_a_gateway_that_reaches_its_rank(server: Server) -> None:
    table = table_at(server.port)
    node_of = {rank["rank"]: rank["node_id"] for rank in table["data"]}
    assert len({node_of[1], node_of[2]}) == 2, "ranks 1 and 2 decode, on a node each"
    ports = [server.port, server.port + 1]
    assert [gateway["port"] for gateway in table["gateways"]] == ports
    assert sorted(gateway["ranks"] for gateway in table["gateways"]) == [[0, 1], [0, 2]]
    for port, gateway in zip(ports, table["gateways"], strict=True):
        body = {"model": "baton-demo", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30)
        assert answer.headers["x-baton-path"].startswith("disaggregated")
        reached = [rank["rank"] for rank in table_at(port)["data"] if rank["reachable"]]
        assert reached == gateway["ranks"]


def test_ranks_of_one_engine_on_two_nodes_give_the_tokens_of_one_rank(server: Server) -> None:
    from baton.engine import LLM, SamplingParams

    prefill = server.rank_of("prefill")
    (follower,) = prefill["follower_pids"]
    assert parent_of(prefill["pid"]) != parent_of(follower), "a node each"
    prompt = "def fox(lazy):\n    return lazy\n" * 9
    body = {"model": "baton-demo", "prompt": prompt, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    assert answer.headers["x-baton-path"].startswith("disaggregated")
    alone = LLM(str(DEMO), num_threads=1, dtype="float32", kv_cache_memory_bytes=2**26)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (expected,) = alone.generate([prompt], params, use_tqdm=False)
    assert answer.json()["choices"][0]["text"] == expected.outputs[0].text


def test_what_starts_and_watches_a_group_is_on_the_node_of_its_ranks(server: Server, nodes: Nodes) -> None:
    titles = {
        process.pid: Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
        for process in descendants(nodes.process.pid)
    }
    for role in ("prefill", "decode"):
        ranks = [rank["pid"] for rank in table_at(server.port)["data"] if rank["role"] == role]
        replicas = [pid for pid, title in titles.items() if title.startswith(f"ray::ServeReplica:nodes:{role}")]
        assert sorted(map(parent_of, replicas)) == sorted(map(parent_of, ranks)) != []


def test_gateways_beside_ranks_take_other_settings_without_another_process(server: Server, nodes: Nodes) -> None:
    """Serve tells the controller of a changed `user_config`."""
    before = table_at(server.port)
    script = (
        "import sys, json, ray; from ray import serve; ray.init(sys.argv[1], log_to_driver=False);"
        "controller = serve.get_deployment_handle('gateway', 'nodes');"
        "controller.reconfigure.remote(json.loads(sys.argv[2])).result(timeout_s=30)"
    )
    body = {"model": "baton-demo", "prompt": ["Hello", "there"], "max_tokens": 1}

    def statuses() -> list[int]:
        urls = [f"http://127.0.0.1:{gateway['port']}/v1/completions" for gateway in before["gateways"]]
        return [httpx.post(url, json=body, timeout=30).status_code for url in urls]

    for user_config, wanted in (({"gateway": {"max_choices": 1}}, 400), ({}, 200)):
        words = [sys.executable, "-c", script, nodes.address, json.dumps(user_config)]
        done = subprocess.run(
            words, env={**os.environ, "RAY_AUTH_MODE": "token"}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        eventually(lambda wanted=wanted: statuses() == [wanted, wanted], 30.0, f"they do not all answer {wanted}")
    after = table_at(server.port)
    assert [gateway["pid"] for gateway in after["gateways"]] == [gateway["pid"] for gateway in before["gateways"]]


def test_a_gateway_that_hangs_is_replaced_at_its_port(server: Server) -> None:
    stays, hangs = table_at(server.port)["gateways"]
    os.kill(hangs["pid"], signal.SIGSTOP)

    def replaced() -> bool:
        now = table_at(server.port)["gateways"]
        return [gateway["port"] for gateway in now] == [stays["port"], hangs["port"]] and now[1]["pid"] != hangs["pid"]

    def serves() -> bool:
        return httpx.get(f"http://127.0.0.1:{hangs['port']}/health").status_code == 200

    eventually(replaced, 60, "the gateway does not come back")
    eventually(serves, 30, "it reaches no engine")
    assert table_at(server.port)["gateways"][0] == stays


def test_a_node_that_is_lost_takes_its_ranks_and_its_gateway_along_and_no_other(server: Server, nodes: Nodes) -> None:
    before = table_at(server.port)
    stays = before["gateways"][0]
    kept_rank = process_of(before, stays["ranks"][1])
    lost_rank = next(gateway["ranks"][1] for gateway in before["gateways"][1:])
    lost_node = next(rank["node_id"] for rank in before["data"] if rank["rank"] == lost_rank)
    nodes.lose(name_of(nodes, lost_node))
    eventually(lambda: len(table_at(stays["port"])["gateways"]) == 1, 30, "the lost gateway is still listed")
    table = table_at(stays["port"])
    assert [gateway["gateway"] for gateway in table["gateways"]] == [stays["gateway"]]
    assert process_of(table, stays["ranks"][1]) == kept_rank, "what its engine needs was on the other node"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{before['gateways'][1]['port']}/health")


def test_gateways_end_with_their_application_though_the_cluster_goes_on(server: Server, nodes: Nodes) -> None:
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.process.wait(timeout=60) == 130
    left = [Path(f"/proc/{process.pid}/cmdline").read_bytes().decode() for process in descendants(nodes.process.pid)]
    assert any(name.startswith("ray::ServeController") for name in left), "the cluster goes on"
    assert [name for name in left if name.startswith(("ray::Gateway", "ray::Engine", "ray::Directory"))] == []


def parent_of(pid: int) -> int:
    """Return the raylet that started the process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def process_of(table: dict[str, Any], rank: int) -> tuple[int, str] | None:
    return next(((entry["pid"], entry["epoch"]) for entry in table["data"] if entry["rank"] == rank), None)


def name_of(nodes: Nodes, node_id: str) -> str:
    code = (
        "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False);"
        "print(*next(node['Resources'] for node in ray.nodes() if node['NodeID'] == sys.argv[2]))"
    )
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-c", code, nodes.address, node_id]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    return next(word for word in done.stdout.split() if word in DECODE_NODES)

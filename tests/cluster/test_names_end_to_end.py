"""Models given by name, from a local server of the Hub's API."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ..helpers.free_ports import free_port
from ..helpers.hub_server import COMMIT, HubServer, hub_server
from ..helpers.served import BATON, baton_serve, config_file, eventually
from .deployed import READY_S, Cluster, RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

DEMO = Path(__file__).parents[2] / "configs/demo/model"
WEIGHTS = "/model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serve the demo model as `demo/model` to all processes of a test, whose cache is empty."""
    with hub_server(demo__model=DEMO) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield server


def answer(url: str) -> str:
    body = {"model": "demo/model", "prompt": "def main():", "max_tokens": 8, "temperature": 0.0}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def status(url: str) -> str:
    return subprocess.run([BATON, "status", "--url", url], capture_output=True, text=True, timeout=60).stdout


def test_serve_takes_a_name(hub: HubServer, tmp_path: Path) -> None:
    port = free_port()
    config = config_file(tmp_path, name="named", port=port, like="unified.yaml")
    with baton_serve(config, port, "demo/model", "--model-id", "demo/model") as server:
        assert answer(server.url)
        assert hub.downloads(WEIGHTS) == [f"/demo/model/resolve/{COMMIT}{WEIGHTS}"]
        assert f"fetches the weights of demo/model, commit {COMMIT}" in server.output()


def test_a_node_fetches_once_for_all_of_its_ranks(hub: HubServer, tmp_path: Path) -> None:
    """A prefill group of one rank and a decode group of two start together; a slow download ends none of them."""
    hub.bytes_per_s = 5e5  # 23 s: longer than the directory waits for a heartbeat
    with contextlib.closing(RayCluster()) as ray:
        cluster = Cluster(ray, tmp_path, name="named", answer_tokens=8)
        cluster.args["model"] = "demo/model"
        del cluster.args["model_id"]
        cluster.args["fleets"]["decode"]["engine"] = {"tensor_parallel_size": 2}
        cluster.deploy()
        fetches = re.compile(r"(prefill|decode)-\w+ starts on [\d.]+: fetches the weights of demo/model, commit c0ffee")
        eventually(lambda: len(fetches.findall(status(cluster.url))) == 2, READY_S, lambda: status(cluster.url))
        cluster.wait_for(lambda ranks: sorted(rank["role"] for rank in ranks) == ["decode", "prefill"])
        assert answer(cluster.url)
        assert len(hub.downloads(WEIGHTS)) == 1
        pids = {pid for rank in cluster.ranks() for pid in (rank["pid"], *rank["follower_pids"])}
        assert len(pids) == 3

"""The CPU demo as the chart deploys it, on a real Ray cluster: each pod is a Ray node on this machine.

The test does KubeRay's work: `ray start` with a pod's rayStartParams and environment, a token, and sending the
application to the dashboard. There is no Kubernetes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from baton.cluster.cli.processes import Process, descendants, kill

from ..helpers.charts import Object, Release, merged, render, values_of
from ..helpers.free_ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

BIN = Path(sys.executable).parent
DEMO = Path(__file__).parents[2] / "configs/demo/model"
TOKEN = "0123456789abcdef" * 4
HOST = "127.0.0.1"
READY_S = 120.0
RAYS_PORTS = ("node-manager", "object-manager", "dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export")


def eventually(condition: Callable[[], Any], what: str, log: Callable[[], str] = lambda: "") -> Any:
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.HTTPError, LookupError, ValueError):  # what answers is still starting
            if found := condition():
                return found
        time.sleep(0.2)
    raise AssertionError(f"after {READY_S:.0f} s: {what}\n{log()}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-8:])


@dataclass
class Pod:
    """A Ray node with a pod's arguments."""

    kind: str
    process: subprocess.Popen[bytes]
    agent_port: int


class Cluster:
    """The pods of a release as Ray nodes on this machine. `end` ends all processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.gcs_port = self.dashboard_port = 0
        self.pods: list[Pod] = []
        self.restarts = 0

    def start(self, release: Release) -> None:
        while not self._heads(release.cluster["headGroupSpec"]):
            pass
        for kind, group in release.groups.items():
            for _ in range(group.replicas):  # one after the other: nodes of one machine choose names of sockets
                while not self._joins(kind, group.spec):
                    pass

    def _heads(self, spec: Object) -> bool:
        self.gcs_port, self.dashboard_port = free_port(), free_port()
        more = {"head": True, "port": self.gcs_port, "dashboard-port": self.dashboard_port, "temp-dir": self._folder}
        return self._begins("head", spec, more, lambda: self._num_nodes() == 1)

    def _joins(self, kind: str, spec: Object) -> bool:
        more = {"address": f"{HOST}:{self.gcs_port}"}
        return self._begins(kind, spec, more, lambda: self._num_nodes() == len(self.pods))

    def _begins(self, kind: str, spec: Object, more: dict[str, Any], is_there: Callable[[], bool]) -> bool:
        """Start a pod; return whether it joined: it ends instead if another process took its port meanwhile."""
        self._start(kind, spec, more)
        started, log = self.pods[-1].process, self._folder / f"{kind}.log"
        eventually(lambda: started.poll() is not None or is_there(), f"no pod {kind}", self.report)
        if started.poll() is not None:
            self.restarts += 1
            assert self.restarts < 3, log.read_text()
            self.pods.pop()
        return started.poll() is None

    def _start(self, kind: str, spec: Object, more: dict[str, Any]) -> None:
        ports = {f"{name}-port": free_port() for name in RAYS_PORTS}
        params = spec["rayStartParams"] | ports | more
        flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in params.items()]
        (container,) = spec["template"]["spec"]["containers"]
        environment = {variable["name"]: variable["value"] for variable in container["env"]}
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        environment["TRITON_CACHE_DIR"] = str(self._folder / "triton")
        process = subprocess.Popen(
            ["bash", "-c", f"exec {BIN}/ray start --block --disable-usage-stats {' '.join(flags)}"],
            env={**os.environ, **environment},
            stdout=(self._folder / f"{kind}.log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pods.append(Pod(kind, process, ports["dashboard-agent-listen-port"]))

    def _num_nodes(self) -> int:
        return len(self._dashboard("/nodes?view=summary").json()["data"]["summary"])

    def report(self) -> str:
        """Return what Serve says of its applications, and the last lines of all logs."""
        try:
            states = yaml.safe_dump(self.applications())
        except (httpx.HTTPError, KeyError) as error:
            states = f"Serve does not answer: {error!r}"
        logs = [*self._folder.glob("*.log"), *self._folder.glob("session_latest/logs/**/*.*")]
        tails = {str(log.relative_to(self._folder)): _tail(log) for log in sorted(logs) if log.is_file()}
        return "\n".join([states, *(f"== {name}\n{tail}" for name, tail in tails.items() if tail)])

    def _dashboard(self, path: str, **request: Any) -> httpx.Response:
        request = {"method": "GET", "headers": {"Authorization": f"Bearer {TOKEN}"}, **request}
        return httpx.request(url=f"http://{HOST}:{self.dashboard_port}{path}", timeout=30, **request)

    def deploy(self, serve_config: str) -> None:
        """Deploy `serveConfigV2` as KubeRay does."""
        answer = self._dashboard("/api/serve/applications/", method="PUT", json=yaml.safe_load(serve_config))
        assert answer.is_success, answer.text

    def applications(self) -> Object:
        return self._dashboard("/api/serve/applications/").json()["applications"]

    def nodes_of(self, deployment: str) -> list[str]:
        """Return the kinds of pods that run a deployment's replicas."""
        replicas = self.applications()["baton"]["deployments"][deployment]["replicas"]
        return [self._kind_of(replica["pid"]) for replica in replicas]

    def kinds_of(self, pids: list[int]) -> list[str]:
        return [self._kind_of(pid) for pid in pids]

    def _kind_of(self, pid: int) -> str:
        (kind,) = (pod.kind for pod in self.pods if pid in {process.pid for process in descendants(pod.process.pid)})
        return kind

    def end(self) -> None:
        seen: set[Process] = set()
        for pod in self.pods:
            seen |= set(descendants(pod.process.pid))
        for pod in self.pods:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pod.process.pid, signal.SIGKILL)
            pod.process.wait()
        kill(seen)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Render the chart's CPU example with a free port and an API key."""
    file = tmp_path_factory.mktemp("keys") / "api_keys"
    file.write_text("sk-one\n")
    changes = {
        "model": str(DEMO),
        "gateway": {"port": free_port(), "api_keys": ["sk-one"], "drain_s": 0, "drain_timeout_s": 1},
        "engine": {"kv_cache_memory_bytes": 2**26},
    }
    release = render(merged(values_of("cpu-demo"), changes))
    service = release.service
    assert "/etc/baton/api_keys" in service["serveConfigV2"]
    service["serveConfigV2"] = service["serveConfigV2"].replace("/etc/baton/api_keys", str(file))
    return release


@pytest.fixture(scope="module")
def cluster(release: Release) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="baton-helm-", dir="/tmp") as folder:  # Ray's socket paths must be short
        cluster = Cluster(Path(folder))
        try:
            cluster.start(release)
            cluster.deploy(release.service["serveConfigV2"])
            yield cluster
        finally:
            cluster.end()


@pytest.fixture(scope="module")
def url(cluster: Cluster, release: Release) -> str:
    """Return the gateway's URL once Kubernetes would count it as ready, and both engines have registered.

    The gateway is ready as soon as one engine can answer alone.
    """
    gateway = release.groups["gateway"]
    url = f"http://{HOST}:{gateway.ports['serve']}"
    path = gateway.container["readinessProbe"]["httpGet"]["path"]
    eventually(lambda: httpx.get(url + path, timeout=5).is_success, "the gateway is not ready", cluster.report)
    eventually(lambda: len(ranks_at(url)) == 2, "an engine is missing", cluster.report)
    return url


def ranks_at(url: str) -> list[Object]:
    """Return the ranks that the gateway reaches, by role."""
    answer = httpx.get(f"{url}/v1/cluster/ranks", headers={"Authorization": "Bearer sk-one"}, timeout=10)
    ranks = answer.raise_for_status().json()["data"]
    return sorted((rank for rank in ranks if rank["reachable"]), key=lambda rank: rank["role"])


def test_a_prompt_goes_through_both_engines_for_who_has_the_key(url: str) -> None:
    body = {"model": "baton-demo", "prompt": "import os\n", "max_tokens": 8}
    refused = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    answered = httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": "Bearer sk-one"}, timeout=60)
    assert refused.status_code == 401
    assert answered.status_code == 200, answered.text
    assert answered.headers["x-baton-path"].startswith("disaggregated")


def test_gateways_and_ranks_are_in_the_pods_that_are_theirs(url: str, cluster: Cluster) -> None:
    assert cluster.nodes_of("gateway") == ["gateway"]
    ranks = ranks_at(url)
    assert [rank["role"] for rank in ranks] == ["decode", "prefill"]
    assert cluster.kinds_of([rank["pid"] for rank in ranks]) == [rank["role"] for rank in ranks]


def test_the_control_plane_of_every_group_is_in_a_pod_of_its_fleet(url: str, cluster: Cluster) -> None:
    for deployment in ("prefill", "decode"):
        assert cluster.nodes_of(deployment) == [deployment]


def test_the_probes_find_all_pods_alive(url: str, cluster: Cluster, release: Release) -> None:
    for pod in cluster.pods:
        (container,) = release.pods[pod.kind]["spec"]["containers"]
        probe = container["livenessProbe"]
        if pod.kind == "gateway":
            *_, script = probe["exec"]["command"]
            script = script.replace(f"{HOST}:52365", f"{HOST}:{pod.agent_port}")
            subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
        else:
            assert probe["httpGet"]["port"] == 52365
            httpx.get(f"http://{HOST}:{pod.agent_port}{probe['httpGet']['path']}", timeout=10).raise_for_status()


def test_a_pod_that_is_told_to_end_lets_its_groups_drain_first(url: str, cluster: Cluster) -> None:
    """SIGTERM, as from Kubernetes. This test is the last one: there is no other node for the group."""
    (pod,) = (pod for pod in cluster.pods if pod.kind == "decode")
    pod.process.terminate()
    eventually(lambda: [rank["role"] for rank in ranks_at(url)] == ["prefill"], "the group has not left its pod")
    drained = eventually(
        lambda: re.search(r"^baton_drains_total (\d+)", httpx.get(f"{url}/metrics", timeout=5).text, re.MULTILINE),
        "nobody has counted a drain",
    )
    assert int(drained[1]) == 1
    pod.process.wait(timeout=60)  # before Kubernetes would kill it

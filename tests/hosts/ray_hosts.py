"""Baton on several hosts: Ray on each with the head's token, kept running as a machine's init would; `serve deploy`.

head      Ray's head with its state in Redis, Serve's controller, the gateway
east      a prefill engine, a decode engine ─┐
west      a prefill engine, a decode engine ─┴─ KV blocks by UCX over TCP, within a host and between them
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml

from baton.cluster.cli.processes import Process

from ..helpers.served import eventually, is_clean
from .hosts import Host, Hosts

BIN = Path(sys.executable).parent
CHECKOUT = Path(__file__).parents[2]
HEAD = "head"
EAST, WEST = ENGINE_HOSTS = ("east", "west")
ROLES = ("prefill", "decode")  # each engine host has an engine of each role
POOL_BYTES = 2**27  # too few bytes for all questions: blocks are evicted, restored, and handed over again
DISK = "/tmp/disk"  # a small disk of each engine host
DISK_BYTES = 320 * 2**20
TIER_FOLDERS = {role: f"{DISK}/{role}" for role in ROLES}
TIER_BYTES = 120 * 2**20
TOKEN = ".ray/auth_token"  # below a home folder
RAY_PORT, DASHBOARD_PORT, REDIS_PORT, PORT = 6379, 8265, 6380, 8000
STORE_BYTES = 80 * 2**20
HANDOFF_S = 10.0  # up to this time gateways do not avoid a hand-off as slow, however busy the machine is
REQUEST_TIMEOUT_S = 150.0  # a gateway's: nothing is open longer
CAPACITY_TIMEOUT_S = 60.0  # longer than the head is cut off
STEP_TIMEOUT_S = 30.0
LEASE_S = 5.0
WORKER = "ray::EngineWorker"
SAME_TOKENS_PER_S = 250_000.0  # within and between hosts: else hand-offs would stay within one
PROMISED = 0.9  # CPUs of one worker; its replica asks for 0.1
KINDS = (
    *(f"ray::ServeReplica:baton:{name}" for name in ("gateway", *ROLES)),
    WORKER,
    "ray::Directory",
    "ray::ServeController",
    "raylet/raylet",
    "gcs/gcs_server",
)
DEPLOY_S = 150.0  # generous: other tests may share the cores
START_S = 90.0

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": "eth0",
}

# Acts like `Restart=always` of a systemd unit: restarts a host's Ray processes, whatever ended them.
KEEP_RUNNING = "while true; do {ray} start --block {options}; {ray} stop --force --grace-period 0; sleep 1; done"

# Joining takes seconds: the command itself waits for the nodes.
COUNT_NODES = """
import ray, time
ray.init({address!r}, log_to_driver=False)
until_s = time.monotonic() + 30.0
while (count := sum(node["Alive"] for node in ray.nodes())) < {expected} and time.monotonic() < until_s:
    time.sleep(0.2)
print(count)
"""


class BatonOnHosts:
    """The application on `hosts`, which have the names `head`, `east` and `west`."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.head = hosts[HEAD]
        self.url = f"http://{self.head.ip}:{PORT}"
        self._http = httpx.Client(base_url=self.url, timeout=10.0)

    def start(self, config: Mapping[str, Any]) -> None:
        """Start everything; return when all engines serve."""
        self.start_ray()
        self.deploy(config)

    def start_ray(self) -> None:
        """Start Redis, then Ray on all hosts; return when all have joined."""
        redis = ["redis-server", "--port", str(REDIS_PORT), "--bind", self.head.ip, "--protected-mode", "no"]
        self.head.start([*redis, "--save", "", "--appendonly", "no"], log="redis.log")
        self.head.run([str(BIN / "ray"), "get-auth-token", "--generate"], timeout_s=60)
        for name in ENGINE_HOSTS:
            self._furnish(self.hosts[name])
        self.keep_ray(HEAD)
        eventually(self._has_head, START_S, lambda: self._log_of(HEAD))
        for name in ENGINE_HOSTS:
            self.keep_ray(name)
        hosts = 1 + len(ENGINE_HOSTS)
        eventually(lambda: self.alive_nodes(hosts) == hosts, START_S, lambda: "".join(map(self._log_of, ENGINE_HOSTS)))

    def _furnish(self, host: Host) -> None:
        """Give a host a disk for KV blocks, and the head's token, which its Ray needs in order to join."""
        host.run(["mkdir", DISK], timeout_s=10)
        host.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", DISK], timeout_s=10)
        file = host.home / TOKEN
        file.parent.mkdir(exist_ok=True)
        file.write_text((self.head.home / TOKEN).read_text())

    def replace(self, name: str) -> None:
        """Replace a host by another machine, and let that join."""
        self._furnish(self.hosts.replace(name))
        self.keep_ray(name)

    def keep_ray(self, name: str) -> None:
        """Start Ray on the host, and start it again whenever it ends."""
        loop = KEEP_RUNNING.format(ray=BIN / "ray", options=shlex.join(self.ray_options(name)))
        redis = {"RAY_REDIS_ADDRESS": f"{self.head.ip}:{REDIS_PORT}"} if name == HEAD else {}
        self.hosts[name].start(["sh", "-c", loop], log="ray.log", environment={**ENVIRONMENT, **redis})

    def ray_options(self, name: str) -> list[str]:
        """Return options of `ray start`. An engine host fits one engine of each role: its successor gets lost ones."""
        where = ["--head", f"--port={RAY_PORT}"] if name == HEAD else [f"--address={self.head.ip}:{RAY_PORT}"]
        dashboard = [f"--dashboard-host={self.head.ip}", f"--dashboard-port={DASHBOARD_PORT}"]
        return [
            *where,
            *(dashboard if name == HEAD else []),
            f"--node-ip-address={self.hosts[name].ip}",
            f"--num-cpus={len(ROLES) if name in ENGINE_HOSTS else 4}",
            f"--object-store-memory={STORE_BYTES}",
            "--resources=" + json.dumps(dict.fromkeys(map(_place_of, ROLES if name in ENGINE_HOSTS else [name]), 1)),
        ]

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Deploy the application. Raises `AssertionError` with its state if it does not serve in time."""
        file = self.head.home / "serve.yaml"
        file.write_text(yaml.safe_dump(dict(config)))
        self._serve("deploy", str(file))
        eventually(self.is_whole, DEPLOY_S, self.state)

    def _has_head(self) -> bool:
        try:
            socket.create_connection((self.head.ip, RAY_PORT), timeout=1.0).close()
        except OSError:
            return False
        return True

    def alive_nodes(self, expected: int = 1) -> int:
        """Return how many nodes Ray's head counts as alive; 0 if it does not answer.

        Waits until they are as many as expected, or a while has passed.
        """
        done = self.head.run(self.counting_nodes(expected), timeout_s=60, environment=ENVIRONMENT, check=False)
        return int(done.stdout.split()[-1]) if done.returncode == 0 else 0

    def counting_nodes(self, expected: int = 1) -> list[str]:
        """Return a command that joins the cluster and prints how many nodes it has, for `alive_nodes`."""
        code = COUNT_NODES.format(address=f"{self.head.ip}:{RAY_PORT}", expected=expected)
        return [sys.executable, "-c", code]

    def ranks(self) -> list[dict[str, Any]]:
        """Return the ranks that the gateway reaches. Raises `httpx.HTTPError` where it does not answer."""
        table = self._http.get("/v1/cluster/ranks").raise_for_status().json()
        return [rank for rank in table["data"] if rank["reachable"]]

    def metric(self, name: str) -> float:
        """Return the sum of this metric over all its labels."""
        lines = self._http.get("/metrics").raise_for_status().text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def decisions(self) -> Counter[float]:
        """Return how many failed attempts the gateways have decided about, by an upper bound of the seconds taken."""
        lines = self._http.get("/metrics").raise_for_status().text.splitlines()
        samples = [
            re.match(r'baton_failure_decision_seconds_bucket{(failure=.*,gateway=.*),le="(.*)"} (.*)', x) for x in lines
        ]
        counts, below = Counter[float](), Counter[str]()
        for series, bound, upto in (sample.groups() for sample in samples if sample):
            counts[float(bound)] += round(float(upto)) - below[series]
            below[series] = round(float(upto))
        return counts

    def rank_of(self, role: str, host: str) -> dict[str, Any]:
        """Return the rank of the engine of this role on this host."""
        ip = self.hosts[host].ip
        return next(rank for rank in self.ranks() if (rank["role"], rank["node_ip"]) == (role, ip))

    def worker_of(self, role: str, host: str) -> Process:
        """Return the process of the engine of this role on this host."""
        processes = self.hosts[host].find(WORKER)
        return processes[self.hosts[host].own_ids(WORKER).index(self.rank_of(role, host)["pid"])]

    def is_whole(self) -> bool:
        """Return whether every engine is in its place, and alive: the gateway's list may be late."""
        ranks = self.ranks()
        places = sorted((rank["node_ip"], rank["role"]) for rank in ranks)
        wanted = sorted((self.hosts[name].ip, role) for name in ENGINE_HOSTS for role in ROLES)
        return places == wanted and all(map(self._lives, ranks))

    def _lives(self, rank: dict[str, Any]) -> bool:
        host = next(self.hosts[name] for name in ENGINE_HOSTS if self.hosts[name].ip == rank["node_ip"])
        return rank["pid"] in host.own_ids(WORKER)

    def census(self) -> Counter[str]:
        """Return the number of processes of each kind that belongs to the application."""
        titles = [title for name in (HEAD, *ENGINE_HOSTS) for title in self.hosts[name].processes().values()]
        return Counter({kind: sum(kind in title for title in titles) for kind in KINDS})

    def state(self) -> str:
        """Return Serve's status as text."""
        return self._serve("status", check=False)

    def is_clean(self) -> bool:
        """Return whether every engine is idle with all blocks free, and none held or quarantined."""
        return self.is_whole() and all(map(is_clean, self.ranks()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    def _serve(self, *words: str, check: bool = True) -> str:
        command = [str(BIN / "serve"), *words, "--address", f"http://{self.head.ip}:{DASHBOARD_PORT}"]
        done = self.head.run(command, timeout_s=120, environment=ENVIRONMENT, check=check)
        return done.stdout + done.stderr

    def _log_of(self, name: str) -> str:
        return (self.hosts[name].folder / "ray.log").read_text()


def _place_of(what: str) -> str:
    """Return the Ray resource that places this part on its hosts."""
    return f"{what}_place"


def demo_config() -> dict[str, Any]:
    """Return configs/serve/demo.yaml with placements, two engines a role, and short leases and hang timeouts.

    The model runs in float32: an answer must not depend on the other requests of its batch.
    """
    config: dict[str, Any] = yaml.safe_load((CHECKOUT / "configs/serve/demo.yaml").read_text())
    args = config["applications"][0]["args"]
    args["model"] = str(CHECKOUT / "configs/demo/model")
    args["transfer"] = {"lease_s": LEASE_S}
    args["gateway"] |= {"host": "0.0.0.0", "port": PORT, "resources": {_place_of(HEAD): 0.001}}
    args["gateway"] |= {"request_timeout_s": REQUEST_TIMEOUT_S, "capacity_timeout_s": CAPACITY_TIMEOUT_S}
    args["gateway"]["cost"] = dict.fromkeys(("node_tokens_per_s", "network_tokens_per_s"), SAME_TOKENS_PER_S)
    args["gateway"]["cost"]["slow_handoff_s"] = HANDOFF_S
    args["engine"] |= {"dtype": "float32", "num_threads": 1, "kv_cache_memory_bytes": POOL_BYTES}
    for role in ROLES:
        args["fleets"][role] |= {
            "replicas": len(ENGINE_HOSTS),
            "num_cpus": PROMISED,
            "step_timeout_s": STEP_TIMEOUT_S,
            "resources": {_place_of(role): 0.6},  # more than half: one a host
        }
        tiers = {"disk_path": TIER_FOLDERS[role], "disk_bytes": TIER_BYTES, "min_tokens": 64}
        args["fleets"][role]["kv_tiers"] = tiers
    return config

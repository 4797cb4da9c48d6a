"""`ray up`, `serve deploy` and `ray down` with configs/ray/on-prem.yaml, over ssh, on hosts with Debian's sshd."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from ..helpers.served import eventually
from .hosts import Host, Hosts
from .ray_hosts import BIN, CHECKOUT, PORT, STORE_BYTES, demo_config

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

DESK = "desk"  # the host of the person who types the commands
MACHINES = ("m1", "m2", "m3")
UP_S = 120.0
READY_S = 150.0
GONE_S = 120.0  # a minute at least: for so long Ray's agents try to tell the head that their raylet has ended
# Ray's workers end after so long without the head; the default is a minute.
SMALL_MACHINE = "UCX_TLS=tcp UCX_NET_DEVICES=eth0 OMP_NUM_THREADS=1 RAY_gcs_rpc_server_reconnect_timeout_s=5"
KEY = ".ssh/id_ed25519"

SSHD = """
HostKey {home}/host_key
AuthorizedKeysFile {home}/.ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
"""


@pytest.fixture(scope="module")
def hosts(machine_with_hosts: None) -> Iterator[Hosts]:
    with Hosts(DESK, *MACHINES) as hosts:
        desk = hosts[DESK]
        (desk.home / ".ssh").mkdir(mode=0o700)
        desk.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(desk.home / KEY)], timeout_s=20)
        public = (desk.home / f"{KEY}.pub").read_text()
        for name in MACHINES:
            _start_sshd(hosts[name], public)
        desk.run([str(BIN / "ray"), "get-auth-token", "--generate"], timeout_s=60)
        yield hosts


def _start_sshd(host: Host, public_key: str) -> None:
    (host.home / ".ssh").mkdir(mode=0o700)
    (host.home / ".ssh/authorized_keys").write_text(public_key)
    host.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host.home / "host_key")], timeout_s=20)
    (host.home / "sshd_config").write_text(SSHD.format(home=host.home))
    host.run(["mkdir", "-p", "/run/sshd"], timeout_s=10)
    host.start(["/usr/sbin/sshd", "-D", "-e", "-f", str(host.home / "sshd_config")], log="sshd.log")


def shipped_config(hosts: Hosts) -> dict[str, Any]:
    """Return the shipped file with these addresses, this key, no GPUs, and without installing packages."""
    text = (CHECKOUT / "configs/ray/on-prem.yaml").read_text()
    assert "--num-gpus=8" in text
    text = text.replace("--num-gpus=8", f"--num-cpus=4 --object-store-memory={STORE_BYTES}")
    text = text.replace("RAY_AUTH_MODE=token", f"RAY_AUTH_MODE=token {SMALL_MACHINE}")
    config: dict[str, Any] = yaml.safe_load(text)
    head, *workers = (hosts[name].ip for name in MACHINES)
    config["provider"] |= {"head_ip": head, "worker_ips": workers}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": f"~/{KEY}"}
    install = [command for command in config["setup_commands"] if "-m venv" in command or "pip install" in command]
    assert len(install) == 2, "the file makes an environment and installs Baton into it"
    others = [command for command in config["setup_commands"] if command not in install]
    config["setup_commands"] = [f"ln -sfn {Path(sys.prefix)} ~/baton/.venv", *others]
    return config


def serve_config() -> dict[str, Any]:
    config = demo_config()
    args = config["applications"][0]["args"]
    args["model"] = "configs/demo/model"
    del args["gateway"]["resources"]
    for role, fleet in args["fleets"].items():
        fleet |= {"replicas": 1, "num_cpus": 0.5, "resources": {f"{role}_node": 0.001}}
    return config


def test_ray_up_brings_a_cluster_up_that_serves_and_ray_down_leaves_nothing(hosts: Hosts) -> None:
    desk, machines = hosts[DESK], [hosts[name] for name in MACHINES]
    cluster = desk.home / "on-prem.yaml"
    cluster.write_text(yaml.safe_dump(shipped_config(hosts)))

    def ray(*words: str, timeout_s: float) -> str:
        command = f"cd {CHECKOUT} && exec {BIN / 'ray'} " + " ".join(words)
        return desk.run(["sh", "-c", command], timeout_s=timeout_s, environment={"RAY_AUTH_MODE": "token"}).stdout

    ray("up", "--yes", "--no-config-cache", str(cluster), timeout_s=UP_S)
    eventually(lambda: all(host.find("raylet/raylet") for host in machines), UP_S, lambda: monitor_log(machines[0]))
    (machines[0].home / "baton/serve.yaml").write_text(yaml.safe_dump(serve_config()))
    deploy = "cd baton && RAY_AUTH_MODE=token .venv/bin/serve deploy serve.yaml"
    ray("exec", str(cluster), f"'{deploy}'", timeout_s=120)

    url = ""

    def serves() -> bool:
        nonlocal url
        (gateway,) = [host for host in machines if host.find("ray::ServeReplica:baton:gateway")] or [machines[0]]
        url = f"http://{gateway.ip}:{PORT}"
        table = httpx.get(f"{url}/v1/cluster/ranks", timeout=5).raise_for_status().json()
        return {rank["role"]: rank["node_ip"] == machines[0].ip for rank in table["data"] if rank["reachable"]} == {
            "prefill": True,
            "decode": False,
        }

    eventually(serves, READY_S, lambda: monitor_log(machines[0]))
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    raw = client.completions.with_raw_response.create(model="baton-demo", prompt="Hello", max_tokens=4)
    assert raw.headers["x-baton-path"].startswith("disaggregated")
    assert raw.parse().usage.completion_tokens > 0

    ray("down", "--yes", str(cluster), timeout_s=120)

    def left() -> list[str]:
        return [title for host in machines for title in host.processes().values() if "sshd" not in title]

    eventually(lambda: left() == [], GONE_S, lambda: f"left over: {left()}")


def monitor_log(head: Host) -> str:
    """Return what Ray's autoscaler did on the head."""
    logs = sorted(head.folder.glob("tmp/ray/session_2*/logs/monitor.*"))
    return "\n".join(log.read_text()[-3000:] for log in logs)

"""A running `baton serve` for end-to-end tests: the command itself, as a user would start it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from baton.cluster.cli.processes import Process, descendants, kill

BATON = str(Path(sys.executable).parent / "baton")
STEP_TIMEOUT_S = 5.0  # of the engines that `config_file` describes
HANDOFF_S = 10.0  # longer than any hand-off takes on a busy machine
READY_S = 120.0  # generous: other tests may share the two cores


def sum_of(metrics: str, name: str, labels: dict[str, str]) -> float:
    """Return the sum of a metric in the text of a scrape, over its series with these labels."""
    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


def command_line(process: Process) -> list[str]:
    """Return the words of a process's command line; an empty one if the process has ended."""
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return [""]


class Server:
    """A `baton serve` process, and every descendant process that was ever seen."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.seen: set[Process] = set()
        self._log = log

    def output(self) -> str:
        return self._log.read_text()

    def look(self) -> list[Process]:
        """Return all of its descendant processes."""
        below = descendants(self.process.pid)
        self.seen |= set(below)
        return below

    def table(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/v1/cluster/ranks", timeout=10.0).raise_for_status().json())

    def ranks(self) -> list[dict[str, Any]]:
        """Return the ranks that the gateway reaches."""
        return [rank for rank in self.table()["data"] if rank["reachable"]]

    def counted(self, metric: str, **labels: str) -> float:
        """Return the sum of a metric over its series with these labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10.0).raise_for_status().text
        return sum_of(text, metric, labels)

    def rank_of(self, role: str) -> dict[str, Any]:
        return next(rank for rank in self.ranks() if rank["role"] == role)

    def processes_named(self, title: str) -> list[Process]:
        """Return the processes to which Ray gave this name, the newest first."""
        found = [process for process in self.look() if command_line(process)[0].startswith(title)]
        return sorted(found, key=lambda process: -process.started_ticks)

    def process_named(self, title: str) -> Process:
        """Return the newest process to which Ray gave this name."""
        return self.processes_named(title)[0]

    def gcs_address(self) -> str:
        """Return the address of its Ray cluster."""
        for process in self.look():
            found = [word.partition("=")[2] for word in command_line(process) if word.startswith("--gcs-address=")]
            if found:
                return found[0]
        raise AssertionError("no Ray process tells where its cluster is")

    def logs(self) -> Path:
        """Return the folder of its Ray cluster's logs."""
        for process in self.look():
            words = [word for word in command_line(process) if word.startswith(("--log_dir=", "--logs-dir="))]
            found = [Path(word.partition("=")[2]) for word in words]
            if found:
                return found[0]
        raise AssertionError("no Ray process tells where its logs are")

    def log_lines(self, pattern: str) -> list[str]:
        """Return the lines of all logs of this name."""
        return [line for file in self.logs().glob(pattern) for line in file.read_text().splitlines()]

    def wait_until_whole(self, roles: list[str], timeout_s: float = READY_S) -> None:
        def whole() -> bool:
            return sorted(rank["role"] for rank in self.ranks()) == sorted(roles)

        eventually(whole, timeout_s, "the fleet is not whole")

    def wait_until_all_blocks_are_free(self, timeout_s: float = 30.0) -> None:
        eventually(lambda: all(map(is_clean, self.ranks())), timeout_s, lambda: f"blocks are missing: {self.ranks()}")


def is_clean(rank: dict[str, Any]) -> bool:
    """Return whether this engine is idle, and holds no stranded blocks."""
    stats = rank["stats"]
    busy = ("running", "waiting", "waiting_for_kv")
    return (
        stats["num_blocks_free"] == stats["num_blocks"] == rank["num_blocks"]
        and stats["num_blocks_held"] == stats["num_blocks_quarantined"] == 0
        and all(stats[f"num_requests_{state}"] == 0 for state in busy)
        and rank["outstanding"] == 0
    )


def eventually(condition: Callable[[], bool], timeout_s: float, otherwise: str | Callable[[], str]) -> None:
    """Wait until the condition holds; network errors meanwhile count as no."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return
        if time.monotonic() > deadline_s:
            raise AssertionError(f"after {timeout_s:.0f} s: {otherwise if isinstance(otherwise, str) else otherwise()}")
        time.sleep(0.1)


def config_file(folder: Path, *, name: str, port: int, like: str = "demo.yaml") -> Path:
    """Write a Serve config with another name and port, and with short timeouts of leases and hangs.

    Hand-offs happen however busy the machine is. The model runs in float32: an answer must not depend on the other
    requests of its batch, and in bfloat16 its last bits would.
    """
    config = yaml.safe_load((Path(__file__).parents[2] / "configs/serve" / like).read_text())
    application = config["applications"][0]
    application["name"] = name
    application["route_prefix"] = f"/{name}"
    application["args"] |= {"transfer": {"lease_s": 5.0}}
    for fleet in application["args"]["fleets"].values():
        fleet["step_timeout_s"] = STEP_TIMEOUT_S
    application["args"]["gateway"] |= {"port": port, "cost": {"slow_handoff_s": HANDOFF_S}}
    application["args"]["engine"] |= {"dtype": "float32"}
    for fleet in application["args"]["fleets"].values():
        fleet["num_cpus"] = 0.1  # two applications share a machine of two cores
    if (
        "prefill" in application["args"]["fleets"]
    ):  # prefill engines offer prompts of some hundred tokens while they read them
        application["args"]["fleets"]["prefill"].setdefault("engine", {})["max_num_batched_tokens"] = 64
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@contextlib.contextmanager
def baton_serve(config: Path, port: int, *options: str) -> Iterator[Server]:
    """Start `baton serve --config`, wait until it is ready, and end all processes that it started afterwards."""
    log = config.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [BATON, "serve", "--config", str(config), *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    server = Server(process, port, log)
    try:
        eventually(lambda: "Ctrl-C stops it" in server.output() or _ended(server), READY_S, server.output)
        server.look()
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kill(server.seen)


def _ended(server: Server) -> bool:
    assert server.process.poll() is None, f"baton serve ended:\n{server.output()}"
    return False

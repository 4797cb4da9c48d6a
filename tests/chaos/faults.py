"""Faults of hosts: small classes with `apply` and `heal`. What a machine's init restarts needs no healing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from baton.cluster.cli.processes import kill

from ..hosts.hosts import BRIDGE, PREFIX
from ..hosts.ray_hosts import DISK, EAST, ENGINE_HOSTS, HEAD, ROLES, TIER_FOLDERS, WEST, WORKER, BatonOnHosts

WIRE = Path(__file__).parents[1] / "hosts/slow_link.py"
FAR = f"{PREFIX}far"  # the slow cable's end at the bridge, and its other end
RAYS_PROCESSES = ("gcs_server", "raylet", "ray::", "ray-dashboard", "monitor.py")  # parts of their titles
BALLAST = f"{DISK}/ballast"
NEAR = f"{PREFIX}near"


class Fault(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def hold_s(self) -> float:
        """Return how long it lasts, from `apply` to `heal`."""
        ...

    @property
    def hides_gateway(self) -> bool:
        """Return whether clients find no gateway meanwhile: else nothing may be refused."""
        ...

    def apply(self, baton: BatonOnHosts) -> None:
        """Raises `AssertionError` where there is nothing to hurt."""
        ...

    def heal(self, baton: BatonOnHosts) -> None: ...


@dataclass(frozen=True)
class Kill:
    """SIGKILL to the processes whose title contains `title`; they come back by themselves."""

    name: str
    title: str
    host: str = ""  # where; everywhere if not given
    hides_gateway: bool = False
    hold_s: float = 0.0

    def apply(self, baton: BatonOnHosts) -> None:
        hosts = [self.host] if self.host else [HEAD, *ENGINE_HOSTS]
        killed = sum(baton.hosts[name].kill(self.title) for name in hosts)
        assert killed, f"{self.name}: no process has {self.title!r} in its title"

    def heal(self, baton: BatonOnHosts) -> None:
        """Serve, Ray and the host's init do."""


@dataclass(frozen=True)
class KillWorker:
    """SIGKILL to one engine's process."""

    role: str
    host: str
    hides_gateway: bool = False
    hold_s: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.role} worker of {self.host} killed"

    def apply(self, baton: BatonOnHosts) -> None:
        kill([baton.worker_of(self.role, self.host)])

    def heal(self, baton: BatonOnHosts) -> None:
        """Serve does."""


@dataclass(frozen=True)
class HeadRestarts:
    """All of Ray on the head ends at once, and starts again with what Redis kept."""

    name: str = "head restarts"
    hides_gateway: bool = True
    hold_s: float = 0.0

    def apply(self, baton: BatonOnHosts) -> None:
        killed = sum(map(baton.head.kill, RAYS_PROCESSES))
        assert killed, "no process of Ray runs on the head"

    def heal(self, baton: BatonOnHosts) -> None:
        """The host's init does."""


@dataclass(frozen=True)
class LinkDown:
    """The host's cable is out for a while."""

    host: str
    hold_s: float

    @property
    def name(self) -> str:
        return f"link of {self.host} down for {self.hold_s:g} s"

    @property
    def hides_gateway(self) -> bool:
        return self.host == HEAD

    def apply(self, baton: BatonOnHosts) -> None:
        baton.hosts[self.host].set_link("down")

    def heal(self, baton: BatonOnHosts) -> None:
        baton.hosts[self.host].set_link("up")


@dataclass(frozen=True)
class HostLost:
    """The host's cable is out for good. After `hold_s` another machine takes its place, at another address."""

    host: str
    hold_s: float = 5.0
    hides_gateway: bool = False

    @property
    def name(self) -> str:
        return f"link of {self.host} down for good"

    def apply(self, baton: BatonOnHosts) -> None:
        baton.hosts[self.host].set_link("down")

    def heal(self, baton: BatonOnHosts) -> None:
        baton.replace(self.host)


class SlowLink:
    """A link on which everything that the host sends is late, and some of it is lost."""

    hides_gateway = False

    def __init__(self, host: str, *, delay_ms: float, loss: float, hold_s: float, seed: int) -> None:
        self.host, self.hold_s = host, hold_s
        self._options = ["--delay-ms", str(delay_ms), "--loss", str(loss), "--seed", str(seed)]
        self.name = f"link of {host} with {delay_ms:g} ms and {loss:.0%} loss for {hold_s:g} s"
        self._wire: subprocess.Popen[bytes] | None = None

    def apply(self, baton: BatonOnHosts) -> None:
        cable = baton.hosts[self.host].link
        _ip("link", "add", FAR, "type", "veth", "peer", "name", NEAR)
        for link, *state in ((cable, "nomaster"), (FAR, "master", BRIDGE), (FAR, "up"), (NEAR, "up")):
            _ip("link", "set", link, *state)
        self._wire = subprocess.Popen([sys.executable, str(WIRE), cable, NEAR, *self._options], stdout=subprocess.PIPE)
        assert self._wire.stdout is not None
        assert self._wire.stdout.readline() == b"ready\n", "the slow cable does not carry"

    def heal(self, baton: BatonOnHosts) -> None:
        assert self._wire is not None
        assert self._wire.poll() is None, "the slow cable broke"
        self._wire.kill()
        self._wire.wait()
        _ip("link", "delete", FAR)
        baton.hosts[self.host].plug_in()


@dataclass(frozen=True)
class DiskFull:
    """The tiers' files are gone, the rest of their disk is taken, and the engines start anew: they find no room."""

    host: str
    hold_s: float = 5.0
    hides_gateway: bool = False

    @property
    def name(self) -> str:
        return f"disk of {self.host} full"

    def apply(self, baton: BatonOnHosts) -> None:
        host = baton.hosts[self.host]
        fill = f"rm -rf {' '.join(TIER_FOLDERS.values())} && cat /dev/zero > {BALLAST}"
        done = host.run(["sh", "-c", fill], timeout_s=30, check=False)
        assert "No space left" in done.stderr, done.stderr
        assert host.kill(WORKER) == len(ROLES), f"not all engines run on {self.host}"

    def heal(self, baton: BatonOnHosts) -> None:
        """The room is there again; engines use it from their next start."""
        baton.hosts[self.host].run(["rm", BALLAST], timeout_s=10)


def all_faults(seed: int) -> list[Fault]:
    """Every kind of fault, hurting every host that it can hurt, and an engine of each role where one is enough."""
    replica = "ray::ServeReplica:baton:{}".format
    kills = [
        *(KillWorker(role, host) for role, host in zip(ROLES, (EAST, WEST), strict=True)),
        *(
            Kill(f"{role} replica of {host} killed", replica(role), host)
            for role, host in zip(ROLES, (WEST, EAST), strict=True)
        ),
        Kill("gateway killed", replica("gateway"), hides_gateway=True),
        Kill("directory killed", "ray::Directory"),
        *(Kill(f"raylet of {host} killed", "raylet/raylet", host) for host in ENGINE_HOSTS),
    ]
    links = [LinkDown(host, hold_s) for host in (HEAD, *ENGINE_HOSTS) for hold_s in (1.0, 20.0)]
    slow = [SlowLink(host, delay_ms=200, loss=0.05, hold_s=20.0, seed=seed) for host in ENGINE_HOSTS]
    lasting = [*map(HostLost, ENGINE_HOSTS), DiskFull(WEST)]
    return [*kills, HeadRestarts(), *links, *lasting, *slow]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)

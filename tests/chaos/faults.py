"""Faults of hosts: small classes with `apply` and `heal`. `heal` does nothing where a host's init heals."""

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
FAR = f"{PREFIX}far"  # the slow cable's end at the bridge; NEAR is its other end
RAYS_PROCESSES = ("gcs_server", "raylet", "ray::", "ray-dashboard", "monitor.py")  # parts of their titles
BALLAST = f"{DISK}/ballast"
NEAR = f"{PREFIX}near"


class Fault(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def hold_s(self) -> float:
        """Return how long the fault lasts, from `apply` to `heal`."""
        ...

    @property
    def hides_gateway(self) -> bool:
        """Return whether clients reach no gateway meanwhile; otherwise no request may be refused."""
        ...

    def apply(self, baton: BatonOnHosts) -> None:
        """Cause the fault. Raises `AssertionError` where there is nothing to hurt."""
        ...

    def heal(self, baton: BatonOnHosts) -> None: ...


@dataclass(frozen=True)
class Kill:
    """Send SIGKILL to the processes whose title contains `title`; they restart by themselves."""

    name: str
    title: str
    host: str = ""  # the host; all hosts if empty
    hides_gateway: bool = False
    hold_s: float = 0.0

    def apply(self, baton: BatonOnHosts) -> None:
        hosts = [self.host] if self.host else [HEAD, *ENGINE_HOSTS]
        killed = sum(baton.hosts[name].kill(self.title) for name in hosts)
        assert killed, f"{self.name}: no process has {self.title!r} in its title"

    def heal(self, baton: BatonOnHosts) -> None:
        """Do nothing: Serve, Ray and the host's init restart processes."""


@dataclass(frozen=True)
class KillWorker:
    """Send SIGKILL to one engine's process."""

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
        """Do nothing: Serve restarts it."""


@dataclass(frozen=True)
class HeadRestarts:
    """End all of Ray on the head at once; it restarts with the state that Redis kept."""

    name: str = "head restarts"
    hides_gateway: bool = True
    hold_s: float = 0.0

    def apply(self, baton: BatonOnHosts) -> None:
        killed = sum(map(baton.head.kill, RAYS_PROCESSES))
        assert killed, "no process of Ray runs on the head"

    def heal(self, baton: BatonOnHosts) -> None:
        """Do nothing: the host's init restarts it."""


@dataclass(frozen=True)
class LinkDown:
    """Unplug the host's cable for a while."""

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
    """Unplug the host's cable for good. After `hold_s` another machine takes its place, at another address."""

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
    """Delay everything that the host sends, and lose some of it."""

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
    """Delete the tiers' files, fill the rest of their disk, and restart the engines, which then find no space."""

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
        """Free the disk; engines use it from their next start on."""
        baton.hosts[self.host].run(["rm", BALLAST], timeout_s=10)


def all_faults(seed: int) -> list[Fault]:
    """Return every kind of fault for every host it can hurt, but only one engine of each role where that suffices."""
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

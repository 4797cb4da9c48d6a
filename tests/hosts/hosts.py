"""Hosts on one machine, as root: namespaces of their own for network, processes, mounts, names and shared memory.

    bridge 10.77.0.1 ──┬── veth ── eth0 10.77.0.11   host "a": own /tmp, /dev/shm, home, process ids
    (this machine)     ├── veth ── eth0 10.77.0.12   host "b"
                       └── veth ── eth0 10.77.0.13   host "c"

A host's processes end with its first one, and its mounts with its last one, so closing a host leaves nothing behind.
The leftovers of a run that was killed are found by their names and removed by the next run. Only one set of hosts can
exist at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from baton.cluster.cli.processes import Process, descendants, kill, wait_until_gone

PREFIX = "btn-"  # begins the name of every network interface and folder that is made here
BRIDGE = f"{PREFIX}bridge"
BRIDGE_MAC = "02:62:74:6e:00:01"  # else it changes with the cables, and hosts send to the old one for a while
NETWORK = "10.77.0"
GATEWAY_IP = f"{NETWORK}.1"  # this machine's own address among the hosts
FIRST_IP = 10
LOCK = Path(f"/run/lock/{PREFIX}hosts")
FOLDERS = Path("/var/tmp")
INIT = Path(__file__).with_name("host_init.py")
SHARED_MEMORY_BYTES = 2**30
NEEDED = ("ip", "unshare", "nsenter", "mount", "redis-server", "sshd", "ssh", "rsync")
LOCK_TIMEOUT_S = 60.0
GONE_S = 5.0


def code_below(folder: str) -> list[Path]:
    """Return the outermost folders that a process needs in order to run our code."""
    roots = {Path(__file__).parents[2], Path(sys.prefix), Path(sys.base_prefix)}
    return sorted(root.resolve() for root in roots if root.resolve().is_relative_to(folder))


def missing_here() -> str:
    """Return why this machine cannot make hosts, or "" if it can."""
    if os.geteuid() != 0:
        return "hosts need root: they are made of namespaces"
    absent = [name for name in NEEDED if shutil.which(name) is None]
    return f"hosts need the commands {', '.join(absent)}: see .ci/run" if absent else ""


class Host:
    """A host. Its first process lives from the constructor to `close`."""

    def __init__(self, name: str, ip: str, folder: Path) -> None:
        self.name, self.ip = name, ip
        self.folder = folder  # path on this machine; its `tmp` and `home` are /tmp and root's home on the host
        self.home = folder / "home"
        self.link = f"{PREFIX}{name}"  # this machine's end of its cable
        self._first = self._start()
        _command("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", str(self._first.pid))
        self.plug_in()
        for words in ("addr add {}/24 dev eth0", "link set eth0 up", "link set lo up", "route add default via {}"):
            self.run(["ip", *words.format(ip if "addr" in words else GATEWAY_IP).split()], timeout_s=10)

    def plug_in(self) -> None:
        """Connect the host's cable to the bridge, as it is from the start."""
        _command("ip", "link", "set", self.link, "master", BRIDGE, "up")

    def set_link(self, state: str) -> None:
        """Set the state of the cable: `down` unplugs it, `up` plugs it in again."""
        _command("ip", "link", "set", self.link, state)

    def bytes_received(self) -> int:
        """Return the bytes received over the cable since it was made."""
        return int(Path(f"/sys/class/net/{self.link}/statistics/tx_bytes").read_text())

    def command(self, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """Return the command that runs `words` on the host when it is started here."""
        enter = ["nsenter", "--target", str(self._first.pid), "--net", "--mount", "--pid", "--uts", "--ipc"]
        own = {"HOME": str(self.home), "HOSTNAME": self.name, "TMPDIR": "/tmp", **environment}
        return [*enter, f"--wd={self.home}", "env", *(f"{name}={value}" for name, value in own.items()), *words]

    def run(
        self, words: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] = {}, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host. If it fails, with `check`, raises `RuntimeError` with its output."""
        command = self.command(words, environment)
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
        if check and done.returncode != 0:
            said = done.stdout + done.stderr
            raise RuntimeError(f"{self.name}: {' '.join(words)} ended with {done.returncode}\n{said}")
        return done

    def start(self, words: Sequence[str], *, log: str, environment: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
        """Start a process in the background; its output goes to the file `log` in the host's folder."""
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen(
                self.command(words, environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def processes(self) -> dict[Process, str]:
        """Return every process on the host but the first, with titles; ids are this machine's."""
        own = _namespace_of(self._first.pid)
        below = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self._first.pid:
                with contextlib.suppress(OSError):  # it has ended, or is the kernel's
                    pid = int(entry.name)
                    if _namespace_of(pid) == own and (process := Process.of(pid)) is not None and process.alive():
                        below[process] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return below

    def find(self, title: str) -> list[Process]:
        """Return its processes whose title contains these words, oldest first."""
        found = (process for process, name in self.processes().items() if title in name)
        return sorted(found, key=lambda process: process.started_ticks)

    def own_ids(self, title: str) -> list[int]:
        """Return the process ids, inside of the host, of processes with such titles."""
        return [_innermost_id(process.pid) for process in self.find(title)]

    def kill(self, title: str) -> int:
        """End such processes with SIGKILL; return how many there were."""
        found = self.find(title)
        kill(found)
        return len(found)

    def kill_all(self) -> None:
        """Kill everything as a power failure would, except the first process and the network."""
        kill(self.processes())

    def close(self) -> None:
        kill([self._first])
        self._process.wait()
        wait_until_gone([self._first], GONE_S)
        subprocess.run(["ip", "link", "delete", self.link], capture_output=True)  # gone with its namespace, or soon

    def _start(self) -> Process:
        for name in ("tmp", "home", "etc"):
            (self.folder / name).mkdir(parents=True)
        (self.home / ".cache").symlink_to(Path.home() / ".cache")  # to find compiled kernels
        passwd = Path("/etc/passwd").read_text().splitlines()
        root = f"root:x:0:0:root:{self.home}:/bin/bash"
        (self.folder / "etc/passwd").write_text("\n".join([root, *(x for x in passwd if not x.startswith("root:"))]))
        (self.folder / "etc/hosts").write_text(f"127.0.0.1 localhost\n{self.ip} {self.name}\n")
        mounts = [
            f"hostname {self.name}",
            f"mount -t tmpfs -o size={SHARED_MEMORY_BYTES} tmpfs /dev/shm",
            *(f"mount --bind {self.folder}/etc/{name} /etc/{name}" for name in ("passwd", "hosts")),
            *(
                f"mkdir -p {self.folder}{root} && mount --bind {root} {self.folder}{root}"
                for root in code_below("/tmp")
            ),
            f"mount --rbind {self.folder}/tmp /tmp",
            f"exec {sys.executable} {INIT} {PREFIX}{self.name}",
        ]
        apart = ["--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        words = ["unshare", *apart, "sh", "-ec", "\n".join(mounts)]
        log = self.folder / "first.log"
        with log.open("wb") as errors:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"host {self.name} did not start: {log.read_text()}")
        return descendants(self._process.pid)[0]


class Hosts:
    """A context with one host for each name, in one network. Raises `RuntimeError` if it cannot be made."""

    def __init__(self, *names: str) -> None:
        if why := missing_here():
            raise RuntimeError(why)
        self._names = names
        self._all: dict[str, Host] = {}
        self._made = 0

    def __getitem__(self, name: str) -> Host:
        return self._all[name]

    def replace(self, name: str) -> Host:
        """Replace a host, which ends, by another machine at another address."""
        self._all.pop(name).close()
        return self._add(name)

    def __enter__(self) -> Self:
        self._lock = _lock()
        clear_leftovers()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=FOLDERS))
        try:
            _command("ip", "link", "add", BRIDGE, "address", BRIDGE_MAC, "type", "bridge")
            _command("ip", "addr", "add", f"{GATEWAY_IP}/24", "dev", BRIDGE)
            _command("ip", "link", "set", BRIDGE, "up")
            for name in self._names:
                self._add(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _add(self, name: str) -> Host:
        self._made += 1
        number = FIRST_IP + self._made
        self._all[name] = Host(name, f"{NETWORK}.{number}", self.folder / f"{self._made}-{name}")
        return self._all[name]

    def close(self) -> None:
        for host in self._all.values():
            host.close()
        clear_leftovers()
        self._lock.close()


def clear_leftovers() -> None:
    """End and remove what an earlier run left: hosts' first processes, cables, the bridge, and folders."""
    firsts = _first_processes()
    kill(firsts)
    wait_until_gone(firsts, GONE_S)
    for link in _links():
        subprocess.run(["ip", "link", "delete", link], capture_output=True)  # its other end may have gone first
    for folder in FOLDERS.glob(f"{PREFIX}*"):
        shutil.rmtree(folder)


def left_over() -> list[str]:
    """Return the parts of hosts that are on this machine now: first processes, interfaces, folders."""
    firsts = [f"process {process.pid}" for process in _first_processes()]
    return [*firsts, *_links(), *map(str, FOLDERS.glob(f"{PREFIX}*"))]


def _first_processes() -> list[Process]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if str(INIT).encode() in words and (process := Process.of(int(entry.name))) is not None:
                found.append(process)
    return found


def _links() -> list[str]:
    return [entry.name for entry in Path("/sys/class/net").iterdir() if entry.name.startswith(PREFIX)]


def _innermost_id(pid: int) -> int:
    """Return the process's id in its own namespace; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


def _namespace_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def _lock() -> IO[str]:
    """Hold the lock for one set of hosts. Raises `RuntimeError` if another set keeps it for too long."""
    file = LOCK.open("w")
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                file.close()
                raise RuntimeError(f"somebody else has hosts on this machine: {LOCK} is locked") from None
            time.sleep(0.2)
        else:
            return file

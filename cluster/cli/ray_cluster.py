"""The Ray cluster that a command uses, its own or one that was running: connection, capacity, unexpected end.

When a terminal closes or a service manager stops a service, all processes get a signal at once, and Ray ends before
`baton serve` can end its processes in order. Any call of Ray's client then waits a minute for them and aborts. So a
thread watches the processes of a cluster that this command started (`RayWatch`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from baton.cluster.disks import default_ray_folder
from baton.cluster.spec import FleetSpec, Reservations
from baton.engine.net.sockets import split_endpoint

# Ray's own switches, which it reads when it is imported.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # else a call after Ray's end would join any other cluster on this machine
    "RAY_worker_niceness": "0",  # with Ray's default of 15, every other process would take cores from a step
}
PROBE_S = 5.0
POLL_S = 0.2
FREED_S = 4.0  # in which Ray frees the resources of processes that have just ended
NEEDED = frozenset({"gcs_server", "raylet"})  # without these processes a cluster is dead
START_S = 5.0
TOKEN_FILE = Path("~/.ray/auth_token")


class NoRayCluster(RuntimeError):
    """No cluster answers at an address, or Ray could not start. The message says which."""


def connect(address: str | None, **own: Any) -> None:
    """Join the cluster at `address` ('auto': the one on this machine), or start one here if it is None.

    `own` are options for `ray.init` of a new cluster. Call it in the main thread. Raises `NoRayCluster`.
    """
    for name, value in ray_environment(joins=address is not None).items():
        os.environ.setdefault(name, value)
    import ray
    from ray._private import utils

    utils.set_sigterm_handler = _leave_signals_alone
    options = own if address is None else {"address": find_running(address)}
    try:
        with _sigterm_kept():
            ray.init(**{"address": "local", "logging_level": logging.ERROR, "log_to_driver": False} | options)
    except Exception as error:  # Ray's errors have no common type
        if address is not None:
            raise NoRayCluster(f"cannot join the Ray cluster at {address}: {error}") from error
        hint = f"Ray's logs are in {default_ray_folder()}"
        if isinstance(error, OSError) and error.filename and TOKEN_FILE.expanduser().is_relative_to(error.filename):
            hint = "Ray keeps its token in ~/.ray: let this user write there, or give one as RAY_AUTH_TOKEN"
        raise NoRayCluster(f"Ray does not start on this machine: {error}. {hint}") from error


def ray_environment(*, joins: bool) -> dict[str, str]:
    """Return the environment variables with which this process uses Ray; those that are set already have precedence.

    A new cluster requires Ray's token. A cluster that runs already (`joins`) may require none: then it ignores the
    token that this process sends, if it has one.
    """
    has_token = (
        "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ or TOKEN_FILE.expanduser().is_file()
    )
    return ENVIRONMENT | ({"RAY_AUTH_MODE": "token"} if has_token or not joins else {})


def leave() -> None:
    """Leave the cluster, and end it if this process started it. Call it in the main thread."""
    import ray

    with _sigterm_kept():
        ray.shutdown()


def missing_capacity(spec: FleetSpec, stop: threading.Event) -> str:
    """Return which resources the cluster lacks for an application: Ray would wait for them for ever.

    Empty if nothing is missing, if an autoscaler may add machines, or once `stop` is set.
    """
    import ray

    total = ray.cluster_resources()
    reservations = Reservations(spec, total.get("GPU", 0.0))
    if missing := reservations.missing_gpus() or reservations.missing_markers(total):
        return missing
    until_s = time.monotonic() + FREED_S
    while missing := reservations.missing_capacity(ray.available_resources(), total):
        if _may_grow():
            return ""
        if time.monotonic() > until_s:
            return missing
        if stop.wait(POLL_S):
            return ""
    return ""


class RayWatch:
    """Calls `on_end` once, in its own thread, if a process that Ray needs has ended, or if Ray has not started
    `START_S` after `stop` was set: it may be waiting for a process that has ended.

    `on_end` must end this process, since the main thread may be inside a call to Ray that does not return.
    """

    def __init__(self, stop: threading.Event, on_end: Callable[[], None]) -> None:
        self._on_end, self._stop = on_end, stop
        self._started, self._left = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="ray-watch", daemon=True).start()

    def started(self) -> None:
        """Note that Ray has started."""
        self._started.set()

    def leave(self) -> None:
        """Stop watching. Call it before Ray is shut down on purpose."""
        self._left.set()

    def _watch(self) -> None:
        stopped_s = 0.0
        while not self._left.wait(POLL_S):
            stopped_s += POLL_S if self._stop.is_set() and not self._started.is_set() else 0.0
            if (stopped_s > START_S or _has_ended()) and not self._left.is_set():
                self._on_end()
                return


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM: `ray.init` installs one below Python's that aborts the process after 3 s, and
    `ray.shutdown` leaves none at all.
    """
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, on_terminate)


def _leave_signals_alone(handler: object) -> None:
    """Do nothing. It replaces Ray's function that installs an exiting signal handler: signals belong to the command."""


def find_running(address: str) -> str:
    """Return HOST:PORT of a cluster that accepts connections. Raises at once if none does; Ray would try for long."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "auto"  # as all commands of Ray do
    if address == "auto":
        return _only_one_here()
    from ray._private.services import canonicalize_bootstrap_address_or_die

    where = address
    try:
        where = canonicalize_bootstrap_address_or_die(address)
        _reach(where)
    except (OSError, ValueError) as error:
        found = "" if where == address else f", which is that of {where}"
        raise NoRayCluster(
            f"no Ray cluster answers at {address}{found} ({error}); give --address HOST:PORT of a head, or start one "
            "with `ray start --head`"
        ) from None
    return where


def _only_one_here() -> str:
    """Return the address that `ray start` has recorded, if it is alive, or else that of the only cluster here.

    Ray's own `auto` takes the first address it finds, even of a dead cluster that a file or a process still names.
    """
    from ray._private.services import find_bootstrap_address, find_gcs_addresses

    named = find_bootstrap_address(None)
    if named and _is_alive(named):
        return named
    alive = sorted(filter(_is_alive, find_gcs_addresses()))
    if len(alive) == 1:
        return alive[0]
    if alive:
        raise NoRayCluster(
            f"{len(alive)} Ray clusters run on this machine: {', '.join(alive)}; say which with --address, as "
            "`baton serve` prints it"
        )
    gone = f" (the last one that `ray start` has made, {named}, does not answer)" if named else ""
    raise NoRayCluster(
        f"no Ray cluster runs on this machine{gone}; give --address HOST:PORT of a head, or start one with "
        "`ray start --head`"
    )


def _is_alive(address: str) -> bool:
    try:
        _reach(address)
    except (OSError, ValueError):
        return False
    return True


def _reach(address: str) -> None:
    """Connect and close. Raises `OSError` if no process listens there, `ValueError` for an invalid address."""
    socket.create_connection(split_endpoint(address), PROBE_S).close()


def _may_grow() -> bool:
    """Return whether the cluster has an autoscaler: only that knows which machines it can add."""
    from ray._private.state import state

    return state.get_max_resources_from_cluster_config() is not None


def _has_ended() -> bool:
    worker = sys.modules.get("ray._private.worker")  # imported by the main thread, after it has set the environment
    node = getattr(worker, "_global_node", None)
    return node is not None and any(kind in NEEDED for kind, _ in node.dead_processes())


def ask_directory(address: str, application: str, method: str, *args: Any) -> Any:
    """Call a method of an application's directory on the cluster at `address`, which is joined first if need be.

    Raises `NoRayCluster`, also if the cluster runs no such application, and the directory's errors. See `leave`.
    """
    if "ray" not in sys.modules or not sys.modules["ray"].is_initialized():  # its import reads `ENVIRONMENT`
        connect(address)
    import ray

    from baton.cluster.membership.directory import NAMESPACE, directory_name

    try:
        directory = ray.get_actor(directory_name(application), namespace=NAMESPACE)
    except ValueError:
        reason = f"the cluster runs no application named {application!r}: see `serve status`, and give --app"
        raise NoRayCluster(reason) from None
    try:
        return ray.get(getattr(directory, method).remote(*args))
    except ray.exceptions.RayTaskError as error:  # of a type that Ray makes, with a traceback as its message
        raise error.cause from None

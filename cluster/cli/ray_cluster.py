"""The Ray cluster of a command: one of its own, or one that is there."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

from baton.engine.net.endpoints import split_endpoint

# Ray's own switches; it reads them when it is imported. Its token authentication stays on.
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # else a call behind Ray's end would join any other cluster of this machine
    "RAY_worker_niceness": "0",  # Ray's 15 lets every other process take the cores from a step
}
PROBE_S = 5.0


class NoRayCluster(RuntimeError):
    """None answers where one should be, or Ray could not start one. The message says which."""


def connect(address: str | None, **own: Any) -> None:
    """Joins the cluster at `address` ('auto': this machine's), or with None starts one here, with the options `own`.

    In the main thread. Raises `NoRayCluster`.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray
    from ray._private import utils

    utils.set_sigterm_handler = _leave_signals_alone
    options = own if address is None else {"address": _answering(address)}
    try:
        with _sigterm_kept():
            ray.init(**{"address": "local", "logging_level": logging.ERROR, "log_to_driver": False} | options)
    except Exception as error:  # what Ray raises has no common type
        what = "Ray does not start on this machine" if address is None else f"the Ray cluster at {address} takes nobody"
        raise NoRayCluster(f"{what}: {error}") from error


def leave() -> None:
    """The inverse of `connect`. In the main thread."""
    import ray

    with _sigterm_kept():
        ray.shutdown()


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """What SIGTERM means stays as it is. In `init` Ray's library puts a handler of its own below Python's, which aborts
    the process after 3 s; behind `shutdown` there is none at all.
    """
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, on_terminate)


def _leave_signals_alone(handler: object) -> None:
    """Ray's handler ends the process with 1 wherever it is: what SIGTERM means is the command's to say."""


def _answering(address: str) -> str:
    """Return HOST:PORT of a cluster where somebody listens: Ray itself would ask for minutes."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "auto"  # as every command of Ray's
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
    """Return the cluster that `ray start` has made known here, or else the only one of this machine.

    Ray's own `auto` is whichever it finds first, be it a dead one's address that a file or a process still names.
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
    """Raises `OSError` where nobody listens, `ValueError` for an address that is none."""
    socket.create_connection(split_endpoint(address), PROBE_S).close()

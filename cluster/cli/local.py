"""An application on this machine: `baton serve` from the first process to the last.

with LocalApplication(spec) as application:   # a Ray cluster of its own, or one that runs already
    application.deploy(show)
    ...
# here every process that it started has ended
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx
import msgspec

from baton.cluster.contracts import LoadBalancing
from baton.cluster.spec import REPLICA_CPUS, FleetSpec

from .processes import adopt_orphans, descendants, kill, kill_below, wait_until_gone
from .ray_cluster import NoRayCluster, connect
from .ray_watch import RayWatch

OBJECT_STORE_BYTES = 100 * 2**20  # nothing large travels through Ray
POLL_S = 0.2
GRACE_S = 5.0  # for processes to end by themselves once Ray is shut down
CONTROLLER_CPUS = 0.5


class ServeFailed(RuntimeError):
    """The application could not be started. The message says why, and where the logs are."""


@dataclass(frozen=True)
class Progress:
    """One thing that is being waited for."""

    name: str
    done: bool
    detail: str = ""


Show = Callable[[Progress], None]


def check_ports_free(spec: FleetSpec) -> None:
    """Raises `ServeFailed` where something listens already: gateways that share a port would not notice."""
    one_a_rank = spec.load_balancing is LoadBalancing.EXTERNAL
    for index in range(spec.num_gateways(nodes=1) if one_a_rank else 1):
        _check_port_free(spec.gateway.host, spec.gateway.port + index)


def _check_port_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            change = "stop the program that has it, or choose another with --port"
            raise ServeFailed(
                f"port {port} on {host} cannot be used ({error.strerror}): "
                f"{change if taken else 'give an address of this machine as --host'}"
            ) from None


class LocalApplication:
    """Starts a Ray cluster (or joins the one at `ray_address`) and runs one application on it.

    Leaving the context ends what it started: the application always, the cluster where it was its own. Raises
    `InvalidSpec` where the application's API keys cannot be read here: it is asked for its ranks.
    """

    def __init__(
        self, spec: FleetSpec, *, name: str, ray_address: str | None = None, on_ray_end: Callable[[], None]
    ) -> None:
        """`on_ray_end` ends this process: it is called where a cluster of its own ends by itself (ray_watch.py)."""
        self._on_ray_end = on_ray_end
        self._watch: RayWatch | None = None
        self._spec, self._name, self._ray_address = spec, name, ray_address
        self._deployed = False
        self.stop = threading.Event()  # set it to make `deploy` and `wait` return early
        host = spec.gateway.host
        self._host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        self.url = f"http://{self._host}:{spec.gateway.port}"
        keys = spec.gateway.keys()
        self._headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}

    def __enter__(self) -> LocalApplication:
        if self._ray_address is None:
            adopt_orphans()
            self._watch = RayWatch(self.stop, self._on_ray_end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shut_down()

    def deploy(self, show: Show) -> None:
        """Returns when the application answers (or `stop` is set). Raises `ServeFailed`."""
        with _step("Ray cluster", show):
            self._start_ray()
        if not self.stop.is_set():
            self._start_application(show)
        if not self.stop.is_set():
            with _step("first answer", show):
                self._wait_until_healthy()

    def ranks(self) -> dict[str, Any]:
        """The engines and gateways as a gateway lists them."""
        answer = httpx.get(f"{self.url}/v1/cluster/ranks", timeout=10.0, headers=self._headers)
        return dict(msgspec.json.decode(answer.raise_for_status().content))

    def wait(self) -> None:
        """Until `stop` is set."""
        while not self.stop.wait(1.0):
            pass

    def _start_ray(self) -> None:
        on_terminate = signal.getsignal(signal.SIGTERM)
        try:
            connect(
                self._ray_address,
                include_dashboard=False,
                num_cpus=max(os.cpu_count() or 1, math.ceil(self._logical_cpus())),
                object_store_memory=OBJECT_STORE_BYTES,
            )
        except NoRayCluster as error:
            raise ServeFailed(str(error)) from error
        signal.signal(signal.SIGTERM, on_terminate)  # Ray has put its own there
        if self._watch is not None:
            self._watch.started()
        from .room import why_no_room  # imports Ray, which reads what `connect` has set

        if missing := why_no_room(self._spec, self.stop):
            raise ServeFailed(missing)

    def _logical_cpus(self) -> float:
        """What the application books with Ray: a small machine may run it all the same, only slower."""
        spec = self._spec
        workers = sum(spec.num_workers_of(role) * fleet.num_cpus for role, fleet in spec.fleets.present.items())
        replicas = sum(fleet.bounds.max_replicas for fleet in spec.fleets.present.values()) * REPLICA_CPUS
        return workers + replicas + spec.num_gateways(nodes=1) * spec.gateway.num_cpus + CONTROLLER_CPUS

    def _start_application(self, show: Show) -> None:
        from ray import serve

        from baton.cluster.app import build_app

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        with _step("Ray Serve", show):
            serve.start(proxy_location="Disabled")
            if self._name in serve.status().applications:
                raise ServeFailed(
                    f"the cluster runs an application named {self._name!r} already: "
                    "end it with `serve shutdown`, which ends all that run there, or give this one another name in a "
                    "--config file"
                )
        args = self._spec.model_dump(mode="json", exclude_unset=True)
        self._deployed = True
        outcome: list[BaseException | None] = []
        route = "/" if self._ray_address is None else f"/{self._name}"  # a cluster that others use has one "/" for all

        def run() -> None:
            try:
                serve.run(build_app(args), name=self._name, route_prefix=route)
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)

        threading.Thread(target=run, name="serve-run", daemon=True).start()
        self._follow(outcome, show)
        if outcome and outcome[0] is not None and not self.stop.is_set():
            raise ServeFailed(f"{self._why_it_failed() or outcome[0]}\nlogs: {_log_folder()}") from outcome[0]

    def _follow(self, outcome: list[BaseException | None], show: Show) -> None:
        """Shows each deployment from its first replica to its last, until `serve.run` returns."""
        expected = {"gateway": self._spec.gateway.replicas}  # where they are kept, one that keeps them
        expected |= {role.value: fleet.first_replicas for role, fleet in self._spec.fleets.present.items()}
        for name in expected:
            show(Progress(name, done=False))
        waiting = dict(expected)
        while waiting and not self.stop.is_set() and not (outcome and outcome[0] is not None):
            for name, running in self._running_replicas().items():
                if name in waiting:
                    detail = f"{running}/{expected[name]}" if expected[name] > 1 else ""
                    show(Progress(name, running >= expected[name], detail))
                    if running >= expected[name]:
                        del waiting[name]
            self.stop.wait(POLL_S)

    def _running_replicas(self) -> dict[str, int]:
        from ray import serve

        application = serve.status().applications.get(self._name)
        if application is None:
            return {}
        return {
            name: sum(count for kind, count in state.replica_states.items() if kind == "RUNNING")
            for name, state in application.deployments.items()
        }

    def _why_it_failed(self) -> str:
        """Serve's words for what is wrong with the deployments that are not healthy."""
        from ray import serve

        application = serve.status().applications.get(self._name)
        if application is None:
            return ""
        sick = [
            state.message for state in application.deployments.values() if state.status != "HEALTHY" and state.message
        ]
        return "\n".join(dict.fromkeys(map(gist, sick))) or application.message  # gateway and engines may say the same

    def _wait_until_healthy(self) -> None:
        while not self.stop.is_set():
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5.0).is_success and self._has_a_gateway_for_every_rank():
                    return
            self.stop.wait(POLL_S)

    def _has_a_gateway_for_every_rank(self) -> bool:
        table = self.ranks()
        served = {rank for gateway in table["gateways"] for rank in gateway["ranks"]}
        return served.issuperset(engine["rank"] for engine in table["data"])

    def _shut_down(self) -> None:
        import ray

        if not ray.is_initialized():
            return
        from ray import serve

        started = [] if self._ray_address is not None else descendants(os.getpid())
        if self._deployed:
            serve.delete(self._name)
            self._end_directory()
        if self._watch is not None:
            self._watch.leave()
        ray.shutdown()
        kill(wait_until_gone(started, GRACE_S))

    def _end_directory(self) -> None:
        import ray

        from baton.cluster.membership.directory import NAMESPACE, directory_name

        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it has ended already, or does so at once
            ray.get(ray.get_actor(directory_name(self._name), namespace=NAMESPACE).end.remote())


def gist(message: str) -> str:
    """A traceback's last error: what a reader wants of it first. The whole is in the logs."""
    errors = list(re.finditer(r"^[A-Za-z_][\w.]*: ", message, flags=re.MULTILINE))
    return message[errors[-1].start() :].strip() if errors else message


def kill_what_started() -> None:
    """Everything below this process."""
    kill_below(os.getpid(), GRACE_S)


def _log_folder() -> str:
    from ray._private import worker

    node = worker.global_worker.node
    return node.get_logs_dir_path() if node is not None else "/tmp/ray/session_latest/logs"


@contextlib.contextmanager
def _step(name: str, show: Show) -> Iterator[None]:
    start_s = time.monotonic()
    show(Progress(name, done=False))
    yield
    show(Progress(name, done=True, detail=f"{time.monotonic() - start_s:.1f} s"))

"""An application on this machine, as `baton serve` starts and ends it.

with LocalApplication(spec) as application:   # starts a Ray cluster of its own, or joins a running one
    application.deploy(show)
    ...
# here, every process that it started has ended
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from baton.cluster.contracts import LoadBalancing
from baton.cluster.disks import default_ray_folder, full_disks
from baton.cluster.planning.model_checks import WeightsCheck
from baton.cluster.spec import REPLICA_CPUS, FleetSpec, InvalidSpec
from baton.engine.net.sockets import endpoint

from .cli_common import EXIT_USAGE
from .processes import adopt_orphans, children, descendants, kill, kill_below, reap_orphans, wait_until_gone
from .ray_cluster import NoRayCluster, RayWatch, connect, leave, missing_capacity

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.serve.schema import ApplicationStatusOverview

OBJECT_STORE_BYTES = 100 * 2**20  # small, because nothing large travels through Ray's object store
POLL_S = 0.2  # between requests to Serve's controller, each of which takes 20 ms of a core
GATEWAY_POLL_S = 0.05
ANSWER_S = 10.0  # timeout of a gateway's answer
GRACE_S = 5.0  # in which processes may end by themselves once Ray is shut down
CONTROLLER_CPUS = 0.5


class ServeFailed(RuntimeError):
    """The application could not be started. The message names the reason and the folder of the logs."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class StartProgress:
    """One step of the start, and whether it is done."""

    name: str
    done: bool
    detail: str = ""


Show = Callable[[StartProgress], None]


class LocalApplication:
    """Starts a Ray cluster (or joins the one at `ray_address`) and runs one application on it.

    Leaving the context ends the application, and the cluster if it was started here. Raises `InvalidSpec` if the API
    keys, which requests to the application need, cannot be read on this machine.
    """

    def __init__(
        self,
        spec: FleetSpec,
        *,
        name: str,
        ray_address: str | None = None,
        stop: threading.Event,
        on_ray_end: Callable[[], None],
    ) -> None:
        """`stop` makes `deploy` and `wait` return early. `on_ray_end` must end this process: `RayWatch` calls it if a
        cluster that was started here ends unexpectedly.
        """
        self._stop, self._on_ray_end = stop, on_ray_end
        self._watch: RayWatch | None = None
        self._directory: ActorHandle | None = None  # of a cluster of its own, once it has started
        self._spec, self.name, self._ray_address = spec, name, ray_address
        self._deployed = False
        host = spec.gateway.host
        self._host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.url = f"http://{endpoint(self._host, spec.gateway.port)}"
        keys = spec.gateway.keys()
        headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        # Plain HTTP on this machine: no proxy, and no certificates, whose reading takes longer than an answer.
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=ANSWER_S, trust_env=False, verify=False)

    def __enter__(self) -> LocalApplication:
        if self._ray_address is None:
            adopt_orphans()
            self._watch = RayWatch(self._stop, self._on_ray_end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self._shut_down()

    def deploy(self, show: Show, weights: WeightsCheck | None = None) -> None:
        """Start everything, and return when the application answers (or `stop` is set). Raises `ServeFailed`.

        `weights`: a check that has begun, without which nothing is deployed.
        """
        if not self._stop.is_set():
            with _step("Ray cluster", show):
                self._start_ray()
        if not self._stop.is_set():
            self._start_serve(show)
        if not self._stop.is_set() and weights is not None:
            _wait_for(weights, self._stop)
        if not self._stop.is_set():
            self._start_application(show)
        if not self._stop.is_set():
            with _step("first answer", show):
                self._wait_until_healthy()

    def ranks(self) -> dict[str, Any]:
        """Return the table of engines and gateways that a gateway serves."""
        answer = self._client.get("/v1/cluster/ranks")
        return dict(msgspec.json.decode(answer.raise_for_status().content))

    @property
    def ray_address(self) -> str:
        """Return the address of the application's Ray cluster, HOST:PORT. Call it after `deploy`."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    def wait(self) -> None:
        """Wait until `stop` is set."""
        own = children()
        while not self._stop.wait(1.0):
            if self._watch is not None:  # orphans are adopted
                reap_orphans(own)

    def _start_ray(self) -> None:
        try:
            with _no_hangup_for_children():
                connect(
                    self._ray_address,
                    include_dashboard=False,
                    num_cpus=cluster_cpus(self._spec),
                    object_store_memory=OBJECT_STORE_BYTES,
                )
        except NoRayCluster as error:
            raise ServeFailed(str(error)) from error
        if self._watch is not None:
            self._watch.started()
        if missing := missing_capacity(self._spec, self._stop):
            raise ServeFailed(missing)

    def _start_serve(self, show: Show) -> None:
        from ray import serve

        from baton.cluster.membership.directory import get_directory

        if self._ray_address is None:  # each member waits for it: so its process starts while Serve's does
            self._directory = get_directory(self.name)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        with _step("Ray Serve", show):
            serve.start(proxy_location="Disabled")
            if self.name in serve.status().applications:
                raise ServeFailed(
                    f"the cluster runs an application named {self.name!r} already: "
                    "end it with `serve shutdown`, which ends all that run there, or give this one another name in a "
                    "--config file"
                )

    def _start_application(self, show: Show) -> None:
        from ray import serve

        from baton.cluster.app import build_app

        args = self._spec.model_dump(mode="json", exclude_unset=True)
        self._deployed = True
        # A Ray cluster that others use has one route "/" for all of its applications.
        route = "/" if self._ray_address is None else f"/{self.name}"
        try:
            # In this thread: if another thread used Ray during its shutdown, Ray would abort this process.
            serve.run_many(
                [serve.RunTarget(build_app(args), name=self.name, route_prefix=route)],
                wait_for_ingress_deployment_creation=False,
                wait_for_applications_running=False,
            )
        except Exception as error:  # Ray's errors have no common type
            raise self._failed(str(error)) from error
        self._follow(show)

    def _failed(self, otherwise: str) -> ServeFailed:
        """Make the error from Serve's message, or else `otherwise`, and from full disks, which may be the cause."""
        why = self._why_it_failed() or otherwise
        return ServeFailed("\n".join([why, *map(str, full_disks()), f"logs: {_log_folder()}"]))

    def _follow(self, show: Show) -> None:
        """Show each deployment until all of its replicas run. Raises `ServeFailed`."""
        expected = {"gateway": self._spec.gateway.replicas}  # or the one replica of the gateway controller
        expected |= {role.value: fleet.first_replicas for role, fleet in self._spec.fleets.present.items()}
        for name in expected:
            show(StartProgress(name, done=False))
        waiting = dict(expected)
        while waiting and not self._stop.is_set():
            if self._directory is not None:  # which ends where nobody calls it for long
                self._directory.application_lives.remote()
            application = self._application()
            if application is not None and application.status == "DEPLOY_FAILED":
                raise self._failed(application.message)
            for name, running in _running_replicas(application).items():
                if name in waiting:
                    detail = f"{running}/{expected[name]}" if expected[name] > 1 else ""
                    show(StartProgress(name, running >= expected[name], detail))
                    if running >= expected[name]:
                        del waiting[name]
            self._stop.wait(POLL_S)

    def _application(self) -> ApplicationStatusOverview | None:
        """Return Serve's status of the application."""
        from ray import serve

        return serve.status().applications.get(self.name)

    def _why_it_failed(self) -> str:
        """Return Serve's messages about the deployments that are not healthy."""
        application = self._application()
        if application is None:
            return ""
        sick = [
            state.message for state in application.deployments.values() if state.status != "HEALTHY" and state.message
        ]
        errors = dict.fromkeys(map(last_error, sick))  # each once: gateways and engines may report the same one
        return "\n".join(errors) or application.message

    def _wait_until_healthy(self) -> None:
        wanted = {role.value: fleet.first_replicas for role, fleet in self._spec.fleets.present.items()}
        while not self._stop.is_set():
            with contextlib.suppress(httpx.HTTPError):
                if self._client.get("/health").is_success and is_whole(self.ranks(), wanted):
                    return
            self._stop.wait(GATEWAY_POLL_S)

    def _shut_down(self) -> None:
        import ray

        if not ray.is_initialized():  # or only partly
            if self._watch is not None:
                self._watch.leave()
                kill_descendants()
            return
        from ray import serve

        started = [] if self._ray_address is not None else descendants(os.getpid())
        if self._deployed:
            try:
                serve.delete(self.name)
                self._end_directory()
            except Exception:  # Ray's errors have no common type
                if self._watch is None:
                    raise
                self._on_ray_end()
        if self._watch is not None:
            self._watch.leave()
        leave()
        kill(wait_until_gone(started, GRACE_S))

    def _end_directory(self) -> None:
        import ray

        from baton.cluster.membership.directory import NAMESPACE, directory_name

        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it has ended already, or does so at once
            ray.get(ray.get_actor(directory_name(self.name), namespace=NAMESPACE).end.remote())


def cluster_cpus(spec: FleetSpec) -> int:
    """Return the CPUs that a Ray cluster for this application alone counts: those that it reserves, or one a process.

    They bind no process to a core. But Ray starts a process ahead for each of them: with a CPU for each core of a large
    machine, dozens that nobody needs would start beside those that everybody waits for.
    """
    gateways, fleets = spec.num_gateways(nodes=1), spec.fleets.present
    reserved = CONTROLLER_CPUS + gateways * spec.gateway.num_cpus
    processes = gateways + (2 if spec.load_balancing is LoadBalancing.INTERNAL else 3)  # controllers, and the directory
    for role, fleet in fleets.items():
        reserved += spec.num_workers_of(role) * fleet.num_cpus + fleet.bounds.max_replicas * REPLICA_CPUS
        processes += fleet.first_replicas * (1 + spec.engine_config(role).world_size)
    return max(math.ceil(reserved), processes)


def _wait_for(weights: WeightsCheck, stop: threading.Event) -> None:
    """Wait for the check's end, or until `stop` is set. Raises `ServeFailed`."""
    try:
        weights.wait(stop)
    except InvalidSpec as error:
        raise ServeFailed(str(error), EXIT_USAGE) from error


def is_whole(table: Mapping[str, Any], wanted: Mapping[str, int]) -> bool:
    """Return whether a gateway's table of ranks shows a complete application: requests take their final routes.

    `wanted` is the number of replicas of each role. Each engine must be served by some gateway, and the gateway whose
    table this is must be connected to all of its own engines: earlier, it would not hand requests over.
    """
    ranks_of = {gateway["gateway"]: gateway["ranks"] for gateway in table["gateways"]}
    served = {rank for ranks in ranks_of.values() for rank in ranks}
    own = ranks_of.get(table["gateway"], [])
    connected = all(
        engine["rank"] in served and (engine["reachable"] or engine["rank"] not in own) for engine in table["data"]
    )
    return connected and Counter(engine["role"] for engine in table["data"]) >= Counter(wanted)


def _running_replicas(application: ApplicationStatusOverview | None) -> dict[str, int]:
    """Count the running replicas by deployment."""
    deployments = {} if application is None else application.deployments
    return {
        name: sum(count for kind, count in state.replica_states.items() if kind == "RUNNING")
        for name, state in deployments.items()
    }


def last_error(message: str) -> str:
    """Return the last error of a traceback, which tells a reader most. The whole traceback is in the logs.

    Messages of Baton's own errors are written for users, who need not know the name of the class.
    """
    errors = list(re.finditer(r"^[A-Za-z_][\w.]*: ", message, flags=re.MULTILINE))
    if not errors:
        return message
    last = errors[-1]
    return message[last.end() if last[0].startswith("baton.") else last.start() :].strip()


def kill_descendants() -> None:
    """Kill all processes below this one."""
    kill_below(os.getpid(), GRACE_S)


def _log_folder() -> str:
    from ray._private import worker

    node = worker.global_worker.node
    return node.get_logs_dir_path() if node is not None else f"{default_ray_folder()}/session_latest/logs"


@contextlib.contextmanager
def _no_hangup_for_children() -> Iterator[None]:
    """Block SIGHUP in processes that are started inside the block, and in theirs: `baton serve` ends them, in order.

    Children inherit the mask; meanwhile, other threads of this process receive the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _step(name: str, show: Show) -> Iterator[None]:
    start_s = time.monotonic()
    show(StartProgress(name, done=False))
    yield
    show(StartProgress(name, done=True, detail=f"{time.monotonic() - start_s:.1f} s"))

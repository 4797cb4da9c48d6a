"""`baton serve`: starts an application on this machine, shows its progress, and ends it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.status import Status

from baton.cluster.contracts import LoadBalancing
from baton.cluster.disks import default_ray_folder, full_disks
from baton.cluster.logs import configure
from baton.cluster.planning.model_checks import WeightsCheck, needs_weights
from baton.cluster.spec import DEFAULT_NAME, FleetSpec, InvalidSpec, applications_in_file, load_spec, with_model
from baton.engine.hf_config.hub import is_hub_name
from baton.engine.net.sockets import socket_family

from .cli_common import fail, print_error
from .http_client import print_ranks
from .local_application import LocalApplication, ServeFailed, StartProgress, kill_descendants
from .options import ServeOptions
from .stop_signals import StopSignals, TolerantOutput

DEFAULT_HOST = "127.0.0.1"
ALL_STOPPED = "Stopped: every process has ended."
CORES_FOR_TWO_GATEWAYS = 8
DISK_LOOK_S = 2.0  # between checks of how full the disks are
SIGNAL_S = 1.0  # in which a signal that ended Ray's processes also reaches this one
QUICK_DRAIN = {"drain_s": 0.0, "drain_timeout_s": 3.0}  # ends quickly on Ctrl-C: no load balancer has to notice


def application_spec(options: ServeOptions, engine_args: dict[str, Any]) -> tuple[str, FleetSpec]:
    """Return the application's name and its settings: those of a config file, if given, changed by the command line.

    Raises `InvalidSpec`.
    """
    name = DEFAULT_NAME
    args: dict[str, Any] = {"gateway": {"host": DEFAULT_HOST, **QUICK_DRAIN}}
    if options.config is not None:
        name, args = _application_in(options.config)
    given = {
        "revision": options.revision,
        "download_dir": options.download_dir,
        "model_id": options.model_id,
    }
    if options.model is not None:
        args = with_model(args, options.model)
    args |= {key: value for key, value in given.items() if value is not None}
    gateway: dict[str, Any] = {"host": options.host, "port": options.port, "replicas": options.gateways}
    gateway |= {"api_keys": options.api_key or None, "allowed_origins": options.allowed_origin or None}
    _put_into(args, "gateway", {key: value for key, value in gateway.items() if value is not None})
    _put_into(args, "engine", engine_args)
    replicas = {"unified": options.unified, "prefill": options.prefill, "decode": options.decode}
    asked = {role: {"replicas": count} for role, count in replicas.items() if count is not None}
    if asked and options.config is not None:
        raise InvalidSpec(
            "--unified, --prefill and --decode say what the config file says already: leave one of them out"
        )
    if "model" not in args:
        from .known_models import no_model

        raise InvalidSpec(no_model())
    if options.config is None:
        args["fleets"] = asked or {"unified": {"replicas": 1}}
        if options.gateways is None and options.address is None:
            args["gateway"]["replicas"] = _num_gateways(engine_args)
    return name, load_spec(args)


def reads_weights(spec: FleetSpec, ray_address: str | None) -> bool:
    """Return whether this command needs the weights: some engine reads them, and runs here, or the model is a folder.

    A cluster that runs already fetches a model of the Hub on its own nodes.
    """
    return needs_weights(spec) and (ray_address is None or not is_hub_name(spec.model))


def _num_gateways(engine_args: Mapping[str, Any]) -> int:
    """Return the number of gateways here: two for a GPU, if cores allow; it makes tokens faster than one can send."""
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*")) and engine_args.get("device") != "cpu"
    return 2 if has_gpu and len(os.sched_getaffinity(0)) >= CORES_FOR_TWO_GATEWAYS else 1


def _put_into(args: dict[str, Any], key: str, given: dict[str, Any]) -> None:
    """Merge settings into a mapping inside `args`. If the file has no mapping there, `load_spec` refuses it later."""
    there = args.get(key, {})
    if given and isinstance(there, dict):
        args[key] = there | given


def _application_in(config: Path) -> tuple[str, dict[str, Any]]:
    try:
        applications = applications_in_file(config)
    except InvalidSpec as error:
        raise InvalidSpec(f"{config}: {error}") from None
    if len(applications) != 1:
        raise InvalidSpec(f"{config}: holds the applications {', '.join(applications)}; `baton serve` runs exactly one")
    return next(iter(applications.items()))


def run(spec: FleetSpec, name: str, ray_address: str | None, *, unchecked_weights: Path | None = None) -> int:
    """Serve until Ctrl-C, and return the exit code.

    `unchecked_weights`: the folder of weights whose tensors are accounted for while Ray starts (`WeightsCheck`).
    """
    configure(spec.logging, "serve", "serve")
    stop = StopSignals(kill_descendants)
    stop.listen()
    try:
        with claimed_ports(spec):
            return Session(spec, name, ray_address, stop).run(unchecked_weights)
    except (PortTaken, InvalidSpec) as error:
        fail(str(error), code=1)


class Session:
    """One application from start to end, and its output on the console. Call `run` once.

    Raises `InvalidSpec` if the application's API keys cannot be read here.
    """

    def __init__(self, spec: FleetSpec, name: str, ray_address: str | None, stop: StopSignals) -> None:
        self._spec, self._stop = spec, stop
        self._application = LocalApplication(
            spec, name=name, ray_address=ray_address, stop=stop.asked, on_ray_end=self._end_without_ray
        )
        self._has_own_ray = ray_address is None
        self._console = Console(file=cast(TextIO, TolerantOutput(sys.stdout)))
        self._display = Display(self._console, f"{spec.served_model_id} from {spec.model}")
        self._disks = DiskWatch(self._console)
        self._ending = threading.Lock()

    def run(self, unchecked_weights: Path | None) -> int:
        """Serve until asked to stop, and return the exit code."""
        code = 0
        try:
            with self._disks, self._application, _check_of(unchecked_weights) as weights:
                self._serve(weights)
        except ServeFailed as error:
            code = error.exit_code
            self._display.close()
            if not self._stop.asked.is_set():
                print_error(str(error))
        except Exception:
            # Ray's errors have no common type. This one may follow from the signal that ends this command, if Ray's
            # processes have received it, too.
            if not (self._has_own_ray and self._stop.asked.wait(SIGNAL_S)):
                raise
        finally:
            self._display.close()
        self._console.print(ALL_STOPPED if self._has_own_ray else "Stopped.")
        return self._stop.code if self._stop.asked.is_set() else code

    def _serve(self, weights: WeightsCheck | None) -> None:
        self._application.deploy(self._display.show, weights)
        self._display.close()
        if not self._stop.asked.is_set():
            _print_ready(self._console, self._application, self._spec)
            _print_commands(self._console, self._application, self._spec)
            self._application.wait()

    def _end_without_ray(self) -> None:
        """End this process without any call to Ray, which would not return. Only the first calling thread does so."""
        self._ending.acquire()
        asked = self._stop.asked.wait(SIGNAL_S)
        self._display.close()
        kill_descendants()
        if not asked:
            print_error(
                f"the Ray cluster has ended: a process that it needs is gone. Ray's logs are in {default_ray_folder()}"
            )
        self._console.print(ALL_STOPPED)
        sys.stdout.flush()
        os._exit(self._stop.code if asked else 1)


def _check_of(weights: Path | None) -> contextlib.AbstractContextManager[WeightsCheck | None]:
    return contextlib.nullcontext() if weights is None else WeightsCheck(weights)


class DiskWatch:
    """Warns on the console about a disk that is too full for Ray's processes, before the start and while serving."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._warned: set[Path] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="disk-watch", daemon=True)

    def __enter__(self) -> DiskWatch:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(DISK_LOOK_S):
            self._look()

    def _look(self) -> None:
        full = {disk.folder: disk for disk in full_disks()}
        for folder in full.keys() - self._warned:
            self._console.print(f"[yellow]warning:[/] {full[folder]}", highlight=False, soft_wrap=True)
        self._warned = set(full)


class Display:
    """Shows the start: a spinner for the current steps, a line for each finished one."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._waiting: dict[str, str] = {}
        self._status: Status | None = None
        console.print(f"Serving [bold]{title}[/]", highlight=False)
        if console.is_terminal:
            self._status = console.status("starting")
            self._status.start()

    def show(self, progress: StartProgress) -> None:
        if progress.done:
            self._waiting.pop(progress.name, None)
            self._console.print(f"  [green]ok[/] {progress.name} {progress.detail}".rstrip(), highlight=False)
        else:
            self._waiting[progress.name] = progress.detail
        if self._status is not None:
            parts = [f"{name} {detail}".strip() for name, detail in self._waiting.items()]
            self._status.update("starting " + ", ".join(parts) if parts else "starting")

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _print_ready(console: Console, application: LocalApplication, spec: FleetSpec) -> None:
    ranks = application.ranks()
    print_ranks(console, ranks)
    for line in _steps(ranks["data"]):
        console.print(line, highlight=False)
    if spec.gateway.page:
        console.print(f"A page of the fleet, with a playground, is at [bold]{application.url}/[/]", highlight=False)
    console.print(f"Ready at [bold]{application.url}/v1[/]. Ctrl-C stops it. Try:\n", highlight=False)
    key = ' -H "Authorization: Bearer $KEY"' if _has_keys(spec) else ""
    body = f'{{"model": "{spec.served_model_id}", "prompt": "def main():", "max_tokens": 32}}'
    line = f"curl {application.url}/v1/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _steps(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line with the step size of each role's engines, which the device and the model may have determined."""
    sizes = {(rank["role"], rank["max_num_seqs"], rank["max_num_batched_tokens"]): None for rank in ranks}
    return [f"A step of a {role} engine has up to {seqs} requests, {tokens} tokens" for role, seqs, tokens in sizes]


def _print_commands(console: Console, application: LocalApplication, spec: FleetSpec) -> None:
    console.print("\nIts state, and how a group of engines is replaced:\n", highlight=False)
    for line in commands_for(application.name, application.url, application.ray_address, spec):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def commands_for(name: str, url: str, ray_address: str, spec: FleetSpec) -> list[str]:
    """Return commands for operating an application, with its addresses: several applications may run on a machine."""
    app = "" if name == DEFAULT_NAME else f" --app {name}"
    key = ' --api-key "$KEY"' if _has_keys(spec) else ""
    return [f"baton status --url {url}{key}", f"baton drain RANK --address {ray_address}{app}"]


def _has_keys(spec: FleetSpec) -> bool:
    return bool(spec.gateway.api_keys or spec.gateway.api_keys_file)


class PortTaken(RuntimeError):
    """A gateway could not listen on its port. The message says what to change."""


@contextlib.contextmanager
def claimed_ports(spec: FleetSpec) -> Iterator[None]:
    """Claim the ports of the first machine's gateways until the block ends, so that no other `baton serve` takes them.

    A gateway listens only when it can answer, and shares its port (SO_REUSEPORT). So two commands that start together
    would both find the port free, and then each get half of the connections. Raises `PortTaken`.
    """
    host, first = spec.gateway.host, spec.gateway.port
    count = spec.num_gateways(nodes=1) if spec.load_balancing is LoadBalancing.EXTERNAL else 1
    with contextlib.ExitStack() as claims:
        for port in range(first, first + count):
            claims.enter_context(_claim(host, port))
            _check_port_is_free(host, port)
        yield


def _claim(host: str, port: int) -> socket.socket:
    """Claim a port by binding its number for UDP, which gateways do not use.

    The kernel gives it to one process only, knows that addresses such as 0.0.0.0 and 127.0.0.1 overlap, and frees it
    however the process ends.
    """
    claim = socket.socket(socket_family(host), socket.SOCK_DGRAM)
    taken = "another `baton serve` has it, or a program that takes UDP there"
    try:
        _bind(claim, host, port, taken)
    except PortTaken:
        claim.close()
        raise
    return claim


def _check_port_is_free(host: str, port: int) -> None:
    with socket.socket(socket_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(probe, host, port, "a program listens there")


def _bind(own: socket.socket, host: str, port: int, taken: str) -> None:
    try:
        own.bind((host, port))
    except OSError as error:
        why = taken if error.errno == errno.EADDRINUSE else error.strerror
        of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        change = (
            "stop it, or choose another port with --port" if of_port else "give an address of this machine as --host"
        )
        raise PortTaken(f"port {port} on {host} cannot be used ({why}): {change}") from None

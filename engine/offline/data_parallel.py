"""Data-parallel ranks without a server: one process takes the requests, and each rank serves a part of them.

LLM ── DataParallelCore ─┬─> EngineCore of data-parallel rank 0, in this process
                         └──ROUTER──DEALER──> serve_requests: EngineCore of rank 1 ...          requests and aborts
                          <─────────────────                                                    outputs
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec
import zmq

from ..core.engine import EngineCore
from ..core.messages import EngineOutput, EngineRequest
from ..net.wakeup import WakeupSocket

_READY = b""  # a rank's first message
_POLL_MS = 200  # how often a wait checks that the other ranks are alive


class _Add(msgspec.Struct, tag=True):
    request: EngineRequest


class _Abort(msgspec.Struct, tag=True):
    request_id: str


class FrontendSockets:
    """The front end's sockets, through which data-parallel ranks get requests and return outputs."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="baton-"))  # for this user only
        self.address = f"ipc://{self._folder / 'frontend'}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(self.address)
        self._wakeup = WakeupSocket(self._context)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[EngineOutput]).decode

    def wait_ready(self, num_ranks: int, check: Callable[[], None]) -> None:
        """Wait until `num_ranks` other ranks are ready; none can join later. `check` raises if one has failed."""
        ready: set[bytes] = set()
        while len(ready) < num_ranks:
            check()
            if self._socket.poll(_POLL_MS):
                ready.add(self._socket.recv_multipart()[0])
        self._remove_folder()  # now, so that even a killed process leaves no folder behind

    def wake(self) -> None:
        """End a waiting `receive`. One other thread may call it."""
        self._wakeup.wake()

    def send(self, rank: int, message: _Add | _Abort) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the rank has gone: `check` will raise
            self._socket.send_multipart([str(rank).encode(), self._encode(message)], zmq.NOBLOCK)

    def receive(self, *, wait: bool) -> list[EngineOutput]:
        """Return the outputs that have arrived. With `wait`, wait briefly for one, or for `wake`."""
        outputs: list[EngineOutput] = []
        if wait:
            zmq.select([self._socket, self._wakeup.socket], [], [], _POLL_MS / 1000)
        self._wakeup.drain()
        while self._socket.poll(0):
            outputs += self._decode(self._socket.recv_multipart()[1])
        return outputs

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class OfflineCore(Protocol):
    """The part of an `EngineCore` that `LLM` needs."""

    def add(self, request: EngineRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def has_work(self) -> bool: ...
    def wait_s(self) -> float: ...
    def step(self) -> list[EngineOutput]: ...


class DataParallelCore:
    """Several data-parallel ranks behind the interface of one engine: a request goes to the least loaded rank."""

    def __init__(self, core: EngineCore, frontend: FrontendSockets, num_ranks: int, check: Callable[[], None]) -> None:
        """`core` is rank 0; the other ranks are connected to `frontend`. `check` raises if one of them has gone."""
        self._core = core
        self._frontend = frontend
        self._check = check
        self._ranks: dict[str, int] = {}  # of every request that has not ended
        self._load = Counter(dict.fromkeys(range(num_ranks), 0))
        core.when_woken(frontend.wake)

    def add(self, request: EngineRequest) -> None:
        rank = min(self._load, key=lambda rank: (self._load[rank], rank))
        self._ranks[request.request_id] = rank
        self._load[rank] += 1
        if rank == 0:
            self._core.add(request)
        else:
            self._frontend.send(rank, _Add(request))

    def abort(self, request_id: str) -> None:
        """End a request with ABORT. Unknown ids are ignored."""
        rank = self._ranks.get(request_id)
        if rank == 0:
            self._core.abort(request_id)
        elif rank is not None:
            self._frontend.send(rank, _Abort(request_id))

    def has_work(self) -> bool:
        """Return whether a step is needed. Also True while other ranks wait for rank 0 to step with them."""
        return self._core.has_work() or bool(self._ranks)

    def wait_s(self) -> float:
        return 0.0  # ranks in lockstep do not yield to other engines

    def step(self) -> list[EngineOutput]:
        """Return the outputs of all ranks. If rank 0 has nothing to do, wait for the others.

        Raises the errors of rank 0's step and of `check`.
        """
        outputs = self._core.step() if self._core.has_work() else []
        wait = bool(self._ranks) and not outputs and not self._core.has_work()
        if wait:
            self._check()
        outputs += self._frontend.receive(wait=wait)
        for output in outputs:
            if output.finish_reason is not None:
                self._load[self._ranks.pop(output.request_id)] -= 1
        return outputs


def serve_requests(core: EngineCore, address: str, rank: int) -> NoReturn:
    """Serve the front end at `address` as data-parallel rank `rank`, until the process ends.

    Raises the error of a step.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.setsockopt(zmq.IDENTITY, str(rank).encode())
    wakeup = WakeupSocket(context)
    core.when_woken(wakeup.wake)
    socket.connect(address)
    socket.send(_READY)
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(_Add | _Abort).decode
    while True:
        if not core.has_work():
            zmq.select([socket, wakeup.socket], [], [])
        wakeup.drain()
        while socket.poll(0):
            match decode(socket.recv()):
                case _Add(request):
                    core.add(request)
                case _Abort(request_id):
                    core.abort(request_id)
        if outputs := core.step():
            socket.send(encode(outputs))

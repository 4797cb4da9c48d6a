"""A file over NIXL's POSIX backend, which uses asynchronous I/O (Linux AIO, io_uring or POSIX AIO).

The agent transfers to itself. The file is memory of type FILE, whose addresses are offsets in the file and whose device
is the file descriptor. Older versions of NIXL report a write that a full disk has cut short as done, so a reader must
check the bytes that it reads.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import TransportError
from . import Ranges, ReadHandle, ReadState
from .common import check_ranges
from .nixl import errors_of, import_nixl

logger = logging.getLogger(__name__)

BACKEND = "POSIX"

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class _Transfer:
    handle: Any
    state: ReadState


class NixlFile:
    """A `FileTransport` over NIXL. One thread makes, uses and closes it; the caller opens and closes the file.

    Raises `TransportError` if the backend is missing or refuses.
    """

    def __init__(self, agent_name: str, fd: int, file_bytes: int, address: int, num_bytes: int) -> None:
        bindings, api = import_nixl()
        self._errors = errors_of(bindings)
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = self._asking("cannot make a NIXL agent", api.nixl_agent, agent_name, config)
        if BACKEND not in self._agent.plugin_list:
            available = ", ".join(sorted(self._agent.plugin_list))
            raise TransportError(f"NIXL has no backend {BACKEND} here, which files need; available: {available}")
        self._asking("cannot start NIXL's files", self._agent.create_backend, BACKEND)
        self._name, self._fd, self._file_bytes = agent_name, fd, file_bytes
        self._address, self._num_bytes = address, num_bytes
        self._registered = [
            self._register("DRAM", (address, num_bytes, 0, "")),
            self._register("FILE", (0, file_bytes, fd, "")),
        ]
        self._ids = itertools.count(1)
        self._transfers: dict[ReadHandle, _Transfer] = {}

    def read(self, ranges: Ranges) -> ReadHandle:
        return self._start("READ", ranges)

    def write(self, ranges: Ranges) -> ReadHandle:
        return self._start("WRITE", ranges)

    def poll(self, handle: ReadHandle) -> ReadState:
        transfer = self._transfers[handle]
        if transfer.state is ReadState.RUNNING:
            transfer.state = self._checked(self._agent.check_xfer_state, transfer.handle)
        return transfer.state

    def release(self, handle: ReadHandle) -> bool:
        transfer = self._transfers[handle]
        assert transfer.state is not ReadState.RUNNING, "what runs may still write"
        try:
            transfer.handle.release()
        except self._errors as error:
            logger.warning("NIXL does not release a transfer yet: %s", error)
            return False
        del self._transfers[handle]
        return True

    def close(self) -> None:
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        del self._agent

    def _start(self, operation: str, ranges: Ranges) -> ReadHandle:
        table = check_ranges(ranges, self._num_bytes, self._file_bytes, "the file").tolist()
        local = self._agent.get_xfer_descs([(self._address + to, size, 0) for _, to, size in table], "DRAM")
        remote = self._agent.get_xfer_descs([(at, size, self._fd) for at, _, size in table], "FILE")
        what = f"cannot prepare a {operation} of a file"
        arguments = (operation, local, remote, self._name, b"", [BACKEND])
        transfer = self._asking(what, self._agent.initialize_xfer, *arguments)
        handle = next(self._ids)
        self._transfers[handle] = _Transfer(transfer, self._checked(self._agent.transfer, transfer))
        return handle

    def _register(self, kind: str, piece: tuple[int, int, int, str]) -> Any:
        what = f"cannot register {piece[1]} bytes as {kind}"
        return self._asking(what, self._agent.register_memory, [piece], kind, [BACKEND])

    def _checked(self, call: Callable[[Any], str], transfer: Any) -> ReadState:
        try:
            said = call(transfer)
        except self._errors:
            return ReadState.FAILED
        return {"DONE": ReadState.DONE, "PROC": ReadState.RUNNING}.get(said, ReadState.FAILED)

    def _asking(self, what: str, call: Callable[..., T], *arguments: object) -> T:
        try:
            return call(*arguments)
        except self._errors as error:
            raise TransportError(f"{what}: {error}") from error

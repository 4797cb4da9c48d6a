"""The other members of an engine's group, as processes on this machine, for an engine without a server.

    this process: rank 0 ──stdin──> python -m baton.engine.offline.local_members: rank 1
                                    python -m baton.engine.offline.local_members: rank 2 ...

A member ends with its group, at the latest when its stdin closes: that is when this process ends, in whatever way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from typing import IO, Any

import msgspec

from ..config import EngineConfig, InvalidEngineConfig
from ..core.engine import EngineCore
from ..parallel.groups import GroupFailed
from ..parallel.member import Member
from .data_parallel import DataParallelCore, FrontendSockets, OfflineCore, serve_requests

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
_FAILED = 1


class _MemberArgs(msgspec.Struct):
    """The arguments of a member process, as one line of JSON on its stdin."""

    engine_args: dict[str, Any]
    rank: int
    rendezvous: str
    frontend: str  # address of the sender of requests; "" with a single data-parallel rank


class LocalMembers:
    """Starts the other members of a group. This process is member 0, described by `member`.

    Raises `InvalidEngineConfig` if the machine has fewer GPUs than there are ranks.
    """

    def __init__(self, config: EngineConfig) -> None:
        from ..parallel.rendezvous import Rendezvous  # loads torch

        _require_devices(config)
        self._rendezvous = Rendezvous()
        self._closing = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._failure: str | None = None
        self._frontend = FrontendSockets() if config.data_parallel_size > 1 else None
        args = _MemberArgs(
            config.model_dump(), 0, self._rendezvous.address, "" if self._frontend is None else self._frontend.address
        )
        self.member = _member(args, config)
        try:
            for rank in range(1, config.world_size):
                self._start(msgspec.structs.replace(args, rank=rank))
        except BaseException:  # Ctrl-C, too
            self.close()
            raise

    def core_of_all_ranks(self, core: EngineCore) -> OfflineCore:
        """Return all data-parallel ranks as one engine. `core` is rank 0. Raises `GroupFailed`."""
        if self._frontend is None:
            return core
        num_ranks = self.member.data_parallel_size
        self._frontend.wait_ready(num_ranks - 1, self.check)
        return DataParallelCore(core, self._frontend, num_ranks, self.check)

    def check(self) -> None:
        """Raise `GroupFailed` if a member's process has ended."""
        if self._failure is not None:
            raise GroupFailed(self._failure)

    def close(self) -> None:
        """Wait for the members to end, and kill those that do not."""
        self._closing = True
        for process in self._processes.values():
            with contextlib.suppress(BrokenPipeError):
                _stdin(process).close()
        for process in self._processes.values():
            try:
                process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._frontend is not None:
            self._frontend.close()

    def _start(self, args: _MemberArgs) -> None:
        process = subprocess.Popen([sys.executable, "-m", __spec__.name], stdin=subprocess.PIPE)
        self._processes[args.rank] = process
        with contextlib.suppress(BrokenPipeError):  # `_watch` reports that the process has ended
            _stdin(process).write(msgspec.json.encode(args) + b"\n")
            _stdin(process).flush()
        watch = threading.Thread(target=self._watch, args=(args.rank, process), daemon=True)
        watch.start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            reason = f"its process ended with exit code {code}"
            self._rendezvous.fail(rank, reason)
            self._failure = f"rank {rank}: {reason}"


def _stdin(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None, "members are started with a pipe"
    return process.stdin


def _require_devices(config: EngineConfig) -> None:
    import torch

    if config.device == "cpu" or not torch.cuda.is_available():
        return
    if (found := torch.cuda.device_count()) < config.world_size:
        raise InvalidEngineConfig(
            "tensor_parallel_size" if config.tensor_parallel_size > found else "data_parallel_size",
            f"asks for {config.world_size} GPUs with all ranks, this machine has {found}",
        )


def _member(args: _MemberArgs, config: EngineConfig) -> Member:
    return Member(
        rank=args.rank,
        tensor_parallel_size=config.tensor_parallel_size,
        data_parallel_size=config.data_parallel_size,
        rendezvous=args.rendezvous,
        device_index=args.rank,
        num_local=config.world_size,
        local_rank=args.rank,
    )


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(_FAILED)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes: only the first one decides
    args = msgspec.json.decode(sys.stdin.buffer.readline(), type=_MemberArgs)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    from ..startup.build import build_engine, follow

    config = EngineConfig.from_args(args.engine_args)
    member = _member(args, config)
    try:
        if member.tp_rank > 0:
            follow(config, member)
        else:
            serve_requests(build_engine(config, member=member).core, args.frontend, member.dp_rank)
    except GroupFailed as error:
        logger.error("rank %d ends: %s", args.rank, error)
        code = _FAILED
    except Exception:
        logger.exception("rank %d failed", args.rank)
        code = _FAILED
    else:
        code = 0
    logging.shutdown()
    os._exit(code)  # not a normal exit, which might wait for collectives that were given up


if __name__ == "__main__":
    _main()

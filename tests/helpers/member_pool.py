"""Processes that are members of groups: started once, given one function after another.

    results = pool.run(my_function, "an argument", tp=2)      # my_function(member, "an argument") in two processes
    results = pool.run(my_function, tp=2, device="cuda")      # rank n is told to take GPU n

A function that does not return in time, or whose process dies, fails the test, and all processes are started anew.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from baton.engine.parallel import Member, ParallelGroups
from baton.engine.parallel.collectives import connect_groups
from baton.engine.parallel.groups import ExpertSpread
from baton.engine.parallel.rendezvous import Rendezvous, RendezvousClient

from .process_context import FORKING

TIMEOUT_S = {"cpu": 60.0, "cuda": 110.0}  # for one function, on a machine that others use as well
GROUP_TIMEOUT_S = 20.0
START_TIMEOUT_S = {"cpu": GROUP_TIMEOUT_S, "cuda": 60.0}  # time until all processes have started; GPUs take longer


class PoolFailed(AssertionError):
    """A function raised in a member, took too long, or ended its process. The message has the member's output."""


class MemberPool:
    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        tp: int = 1,
        dp: int = 1,
        device: str = "cpu",
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Run `function(member, *args)` in each member of a group, and return the results in rank order.

        The function stands at the top of a module; its arguments and results can be pickled. It must end within
        `timeout_s`, by default the device's limit. Raises `PoolFailed`.
        """
        size, rendezvous = tp * dp, Rendezvous()
        self._grow_to(size)
        for rank, pipe in enumerate(self._pipes[:size]):
            member = Member(
                rank=rank,
                tensor_parallel_size=tp,
                data_parallel_size=dp,
                rendezvous=rendezvous.address,
                device_index=rank if device == "cuda" else None,
                num_local=size,
                local_rank=rank,
                start_timeout_s=START_TIMEOUT_S[device],
            )
            pipe.send((function, member, args))
        deadline = time.monotonic() + (TIMEOUT_S[device] if timeout_s is None else timeout_s)
        answers = [self._answer(rank, deadline) for rank in range(size)]
        failures = [text for failed, text in answers if failed]
        if failures:
            self.close()
            raise PoolFailed("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _grow_to(self, size: int) -> None:
        while len(self._processes) < size:
            ours, theirs = FORKING.Pipe()
            process = FORKING.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _answer(self, rank: int, deadline: float) -> tuple[bool, Any]:
        pipe = self._pipes[rank]
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            return True, f"rank {rank} took too long"
        try:
            answer: tuple[bool, Any] = pipe.recv()
        except EOFError:
            return True, f"rank {rank} ended"
        return answer


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        function, member, args = pipe.recv()
        try:
            answer = (False, function(member, *args))
        except Exception:
            answer = (True, f"rank {member.rank}:\n{traceback.format_exc()}")
        pipe.send(answer)


def device_of(member: Member) -> torch.device:
    """Return the device of a member of the pool."""
    return torch.device("cpu") if member.device_index is None else torch.device("cuda", member.device_index)


@contextmanager
def groups_of(
    member: Member, spread: ExpertSpread | None = None, *, peer_memory: bool = True
) -> Iterator[ParallelGroups]:
    """Return the communication groups of a member of the pool, on its device."""
    device = device_of(member)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rendezvous_client = RendezvousClient(member.rendezvous, member.rank, timeout_s=member.start_timeout_s)
    groups = connect_groups(
        member, rendezvous_client, device, spread, timeout_s=GROUP_TIMEOUT_S, peer_memory=peer_memory
    )
    yield groups
    groups.widest.barrier()  # a member that is done must not leave while others still communicate
    groups.close()
    groups.wait_closed(GROUP_TIMEOUT_S)

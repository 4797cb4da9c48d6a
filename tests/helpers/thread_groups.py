"""Groups whose members are threads of one process: they exchange real tensors, and a test starts at once.

    results = run_ranks(lambda groups: model_of(groups)(x), tp=2, dp=2)      in rank order

A member that raises ends the others' waiting; the first error is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from baton.engine.parallel.groups import ALONE, ExpertSpread, Group, ParallelGroups

TIMEOUT_S = 20.0

Result = TypeVar("Result")
Given = TypeVar("Given")


class _Table:
    """A table through which the members of one group exchange values: each lays one down and takes the others'."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.brought: list[object] = [None] * size

    def exchange(self, rank: int, thing: Given) -> list[Given]:
        self.brought[rank] = thing
        self.barrier.wait(TIMEOUT_S)
        everyones: list[Given] = list(self.brought)  # type: ignore[arg-type]
        self.barrier.wait(TIMEOUT_S)  # nobody brings the next thing before all have taken this one
        return everyones


class ThreadGroup(Group):
    def __init__(self, rank: int, table: _Table) -> None:
        self.rank, self.size = rank, len(table.brought)
        self._table = table

    def all_reduce(self, x: Tensor) -> Tensor:
        total = torch.stack(self._table.exchange(self.rank, x.clone())).sum(0, dtype=x.dtype)
        return x.copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._table.exchange(self.rank, x.clone()))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        total = torch.stack(self._table.exchange(self.rank, x.clone())).sum(0, dtype=x.dtype)
        return total.chunk(self.size)[self.rank].clone() if len(x) else x

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        assert sum(sent) == len(x)
        parts = [pieces[self.rank] for pieces in self._table.exchange(self.rank, x.clone().split(list(sent)))]
        assert [len(part) for part in parts] == list(received)
        return torch.cat(parts)

    def all_max(self, values: Sequence[int]) -> list[int]:
        return [max(column) for column in zip(*self._table.exchange(self.rank, list(values)), strict=True)]

    def close(self) -> None:
        self._table.barrier.abort()


class Closing(Group):
    """A group that records that it was closed: members that wait in it return."""

    rank, size = 0, 2
    all_reduce = all_gather = reduce_scatter = all_to_all = all_max = lambda self, *args: ALONE.all_max([])

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def thread_groups(tp: int, dp: int, spread: ExpertSpread | None = None) -> list[ParallelGroups]:
    """Return the groups of all members, in rank order."""
    size = tp * dp
    of_tp = [_Table(tp) for _ in range(dp)]
    of_dp = [_Table(dp) for _ in range(tp)]
    everyone = _Table(size)

    def group(rank: int, table: _Table) -> Group:
        return ThreadGroup(rank, table) if len(table.brought) > 1 else ALONE

    return [
        ParallelGroups(
            tp=group(rank % tp, of_tp[rank // tp]),
            dp=group(rank // tp, of_dp[rank % tp]) if spread else ALONE,
            ep=group(rank, everyone) if spread else ALONE,
            spread=spread,
        )
        for rank in range(size)
    ]


def run_threads(works: Sequence[Callable[[], Result]], on_error: Callable[[], None]) -> list[Result]:
    """Run each function in a thread, and return the results. Once all have ended, raise the first error."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(index: int, work: Callable[[], Result]) -> None:
        try:
            results[index] = work()
        except BaseException as error:
            errors.append(error)
            on_error()

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
        assert not thread.is_alive(), "a rank waits for ever"
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(works))]


def run_ranks(
    work: Callable[[ParallelGroups], Result], *, tp: int = 1, dp: int = 1, spread: ExpertSpread | None = None
) -> list[Result]:
    """Run `work(groups)` of all members at the same time, and return the results."""
    members = thread_groups(tp, dp, spread)

    def abort() -> None:
        for groups in members:
            groups.close()

    return run_threads([lambda groups=groups: work(groups) for groups in members], abort)  # type: ignore[misc]

"""Collective operations of a group, and the groups that a member belongs to.

Results have equal bits on every rank: all of them draw the same tokens without being told which.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALL2ALL_BACKENDS = ("allgather_reducescatter", "all_to_all")  # how tokens reach experts on other data-parallel ranks


class Group(abc.ABC):
    """Ranks 0 to `size` - 1. Every member calls the same methods in the same order, with tensors of like shapes.

    Where the group is of GPUs, collectives of tensors go into the current stream and may be captured. Those of integers
    and the end of the group are for the CPU. Everything raises `CollectiveFailed` once a member has gone.
    """

    rank: int
    size: int

    @abc.abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of everyone's `x`, in place; `x`."""

    @abc.abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Everyone's `x` [n, ...], one after the other in rank order: [size * n, ...]."""

    @abc.abstractmethod
    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum of everyone's `x` [size * n, ...], of which rank r gets the r-th part: [n, ...]."""

    @abc.abstractmethod
    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """`sent[i]` rows of `x` go to rank i; gives `received[i]` rows from each, in rank order."""

    @abc.abstractmethod
    def agree(self, values: Sequence[int]) -> list[int]:
        """The maximum over all ranks of each of a few integers; of negated ones, so, the minimum. On the CPU."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leaves the group, and ends whatever of it still runs. Nothing may be called afterwards."""

    def wait_closed(self, timeout_s: float) -> None:  # noqa: B027 (most groups end at once)
        """Behind `close`: until nothing of it is left, which captured steps hold up. Warns where it takes longer."""

    def rehearse(self, dtype: torch.dtype) -> None:  # noqa: B027 (most groups launch no kernels of ours)
        """Before ready: whatever collectives of that type will launch, whatever their size, is compiled."""

    def sketch(self, rank: int) -> Group:
        """Return a stub of this group for its `rank`, which waits for no rank: results have shapes and no meaning."""
        return _Sketched(rank, self.size)


class _Alone(Group):
    """A group of one, which has nobody to wait for."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return x

    def agree(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def close(self) -> None:
        pass


ALONE: Group = _Alone()


class _Sketched(Group):
    """A rank by itself: results have their shapes and mean nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.repeat(self.size, *[1] * (x.dim() - 1))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[: x.shape[0] // self.size].clone()

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return x.new_zeros(sum(received), *x.shape[1:])

    def agree(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def close(self) -> None:
        pass


def _sketched(group: Group, rank: int | None = None) -> Group:
    """`group` as seen by its `rank`; None: by the caller's."""
    return group if group.size == 1 else group.sketch(group.rank if rank is None else rank)


@dataclass(frozen=True)
class ExpertSpread:
    """The spread of whole experts over all ranks of a group."""

    num_redundant: int = 0  # copies of experts, beyond the model's
    backend: str = ALL2ALL_BACKENDS[0]


@dataclass(frozen=True)
class ParallelGroups:
    """The groups of one member.

    `dp` and `ep` are more than this member only where experts are spread over the ranks (`enable_expert_parallel`):
    other data-parallel ranks have nothing to do with each other.
    """

    tp: Group = ALONE  # the ranks that share this one's requests
    dp: Group = ALONE  # the ranks with this one's `tp.rank`, one of each data-parallel rank
    ep: Group = ALONE  # all ranks, in the order of their global ranks
    spread: ExpertSpread | None = None  # None: each rank has a stretch of every expert

    @property
    def widest(self) -> Group:
        """All ranks that this one ever waits for."""
        return self.ep if self.ep.size > 1 else self.tp

    def sketches(self) -> list[ParallelGroups]:
        """Groups that look alike and wait for nobody, for steps of which only the kernels are of interest.

        One for each kind of rank: the first adds to what it is given, where the others do not.
        """
        dp, ep = _sketched(self.dp), _sketched(self.ep)
        return [ParallelGroups(_sketched(self.tp, rank), dp, ep, self.spread) for rank in sorted({0, self.tp.size - 1})]

    def rehearse(self, dtype: torch.dtype) -> None:
        """See `Group.rehearse`. All members call it."""
        for group in self._each():
            group.rehearse(dtype)

    def close(self) -> None:
        for group in self._each():
            group.close()

    def wait_closed(self, timeout_s: float) -> None:
        """See `Group.wait_closed`."""
        for group in self._each():
            group.wait_closed(timeout_s)

    def _each(self) -> list[Group]:
        return list({id(group): group for group in (self.ep, self.dp, self.tp)}.values())


ALL_ALONE = ParallelGroups()

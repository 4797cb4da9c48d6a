"""Collective operations of a group, and the groups to which a member belongs.

Results have equal bits on every rank, so that all ranks draw the same tokens.
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
    """Ranks 0 to `size` - 1. All members call the same methods in the same order, with tensors of matching shapes.

    In a group of GPUs, collectives of tensors are launched in the current stream and may be captured; `all_max`,
    `all_min`, `barrier` and `close` run on the CPU. All methods raise `CollectiveFailed` once a member has gone.
    """

    rank: int
    size: int

    @abc.abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks, in place. Returns `x`."""

    @abc.abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate all ranks' `x` [n, ...] in rank order: [size * n, ...]."""

    @abc.abstractmethod
    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum `x` [size * n, ...] over all ranks; rank r gets the r-th part: [n, ...]."""

    @abc.abstractmethod
    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `sent[i]` rows of `x` to rank i, and return `received[i]` rows from each, in rank order."""

    @abc.abstractmethod
    def all_max(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise maximum of all ranks' integers."""

    def all_min(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise minimum of all ranks' integers."""
        return [-value for value in self.all_max([-value for value in values])]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.all_max([0])

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the group, and end its running collectives. Nothing may be called afterwards."""

    def wait_closed(self, timeout_s: float) -> None:  # noqa: B027 (most groups end at once)
        """Wait, after `close`, for the end of the group, which captured steps may delay. Warns on a timeout."""

    def warm_up(self, dtype: torch.dtype) -> None:  # noqa: B027 (most groups launch no kernels of ours)
        """Launch every kernel that collectives of this dtype may use, for any size. Called before it is ready."""

    def stub(self, rank: int) -> Group:
        """Return a group that looks like this one does on `rank`, but waits for no other: only shapes are right."""
        return StubGroup(rank, self.size)


class _Alone(Group):
    """A group of one."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return x

    def all_max(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def close(self) -> None:
        pass


ALONE: Group = _Alone()


class StubGroup(Group):
    """A group without other processes: results have the right shapes, but meaningless values."""

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

    def all_max(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def close(self) -> None:
        pass


def _stub(group: Group, rank: int | None = None) -> Group:
    """Return the stub of `group` for `rank`; None: for the caller's rank."""
    return group if group.size == 1 else group.stub(group.rank if rank is None else rank)


@dataclass(frozen=True)
class ExpertSpread:
    """The distribution of whole experts over all ranks of a group."""

    num_redundant: int = 0  # copies of experts, beside the model's own
    backend: str = ALL2ALL_BACKENDS[0]


@dataclass(frozen=True)
class ParallelGroups:
    """The groups of one member.

    `dp` and `ep` have other members only if experts are spread over the ranks (`enable_expert_parallel`). Otherwise
    data-parallel ranks are independent.
    """

    tp: Group = ALONE  # the ranks that share this one's requests
    dp: Group = ALONE  # the ranks with this one's `tp.rank`, one from each data-parallel rank
    ep: Group = ALONE  # all ranks, in the order of their global ranks
    spread: ExpertSpread | None = None  # None: each rank has a slice of every expert

    @property
    def widest(self) -> Group:
        """The group of all ranks for which this one may ever have to wait."""
        return self.ep if self.ep.size > 1 else self.tp

    @property
    def of_draft_model(self) -> ParallelGroups:
        """The groups of a draft model. Its experts are divided, not spread, so it involves no other ranks."""
        return ParallelGroups(tp=self.tp)

    def stubs(self) -> list[ParallelGroups]:
        """Return groups that wait for no other process, for profile runs in which only the launched kernels matter.

        There is one for each kind of rank: the first one adds to the residual stream, the others do not.
        """
        dp, ep = _stub(self.dp), _stub(self.ep)
        return [ParallelGroups(_stub(self.tp, rank), dp, ep, self.spread) for rank in sorted({0, self.tp.size - 1})]

    def warm_up(self, dtype: torch.dtype) -> None:
        """See `Group.warm_up`. All members must call it."""
        for group in self._each():
            group.warm_up(dtype)

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


class GroupFailed(RuntimeError):
    """A member of the group has gone or failed, so that none of them can continue."""


class CollectiveFailed(GroupFailed):
    """A collective failed because another rank did not take part. The watch of the ranks knows the reason."""

"""Dispatch of tokens to the ranks that hold their experts, and combination of the results.

    hidden, expert ids, weights ──prepare──> tokens that this rank's experts serve ──experts──> partial sums
    sums for the rank's own tokens <───────────────────finalize──────────────────────────────────────┘

    Replicated      all ranks have the same tokens: each serves those that chose its experts
    GatherScatter   all tokens go to all ranks; shapes depend only on the numbers of tokens
    OverPeers       the same shapes, but a token's row goes only to ranks of its experts, through peer memory
    AllToAll        a token goes only to ranks of its experts; the counts are known only after routing

The result of `finalize` must still be summed over the ranks that share the rank's requests (`groups.tp`): the caller
does so, together with everything else that is divided over them.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels import p2p
from baton.kernels.expert_map import ExpertMap, map_experts
from baton.kernels.p2p import RoutedTokens

from .groups import ParallelGroups
from .placement import ExpertPlacement
from .symmetric import SymmetricGroup


@dataclass(frozen=True)
class DispatchHandle:
    """The routes of tokens that `AllToAll` has sent, by which `finalize` sends the results back."""

    sent: list[int]  # tokens to each rank
    received: list[int]
    first: int  # this rank's first token that was sent
    parts: Tensor  # [n, most ranks of a token] int64: for each token, the rows of the results to add up


@dataclass(frozen=True)
class Served:
    """The tokens that this rank's experts serve."""

    hidden: Tensor  # [N, hidden_size]
    expert_ids: Tensor  # [N, top_k] int32: places on this rank; -1 for experts on other ranks
    weights: Tensor  # [N, top_k] float32
    num_own: int  # tokens that `finalize` returns
    handle: DispatchHandle | None = None
    visits: Tensor | None = None  # the result of `p2p.dispatch`, if that brought the tokens


class ExpertDispatch(abc.ABC):
    """One method of dispatch. All ranks call `prepare` and `finalize` in the same order."""

    is_local = False  # the tokens served are the rank's own, so their results may be added up in place

    @abc.abstractmethod
    def prepare(self, tokens: RoutedTokens, table: ExpertMap, of_ranks: Sequence[int] | None) -> Served:
        """Collect the tokens that this rank's experts serve. All ranks that share its requests have the same T tokens.

        `of_ranks` is T of each data-parallel rank; None: the same everywhere.
        """

    @abc.abstractmethod
    def finalize(self, partial: Tensor, served: Served) -> Tensor:
        """Sum the experts' results `partial` [N, ...] of all ranks into [T, hidden_size] for this rank's own tokens."""


class Replicated(ExpertDispatch):
    is_local = True

    def __init__(self, groups: ParallelGroups, placement: ExpertPlacement) -> None:
        self._places = placement.places(groups.ep.rank)

    def prepare(self, tokens: RoutedTokens, table: ExpertMap, of_ranks: Sequence[int] | None) -> Served:
        num_own = len(tokens.hidden)
        ids = map_experts(tokens.expert_ids, table, places=self._places, counted=range(num_own))
        return Served(tokens.hidden, ids, tokens.weights, num_own)

    def finalize(self, partial: Tensor, served: Served) -> Tensor:
        return partial


class GatherScatter(ExpertDispatch):
    def __init__(self, groups: ParallelGroups, placement: ExpertPlacement) -> None:
        self._dp = groups.dp
        self._places = placement.places(groups.ep.rank)

    def prepare(self, tokens: RoutedTokens, table: ExpertMap, of_ranks: Sequence[int] | None) -> Served:
        num_own = len(tokens.hidden)
        most = max(of_ranks) if of_ranks else num_own
        first = self._dp.rank * most
        came = tokens.padded(most).through(self._dp.all_gather)
        ids = map_experts(came.expert_ids, table, places=self._places, counted=range(first, first + num_own))
        return Served(came.hidden, ids, came.weights.contiguous(), num_own)

    def finalize(self, partial: Tensor, served: Served) -> Tensor:
        return self._dp.reduce_scatter(partial)[: served.num_own]


class OverPeers(ExpertDispatch):
    """`GatherScatter` over peer memory, with equal bits, for steps of one size. Rows that a rank ignores are not sent.

    Each direction uses peer memory where that was measured to be faster, and collectives otherwise.
    """

    def __init__(self, groups: ParallelGroups, placement: ExpertPlacement, group: SymmetricGroup) -> None:
        """Use the peer memory of the data-parallel `group`."""
        self._otherwise = GatherScatter(groups, placement)
        self._group = group
        slots, column = placement.slots, groups.tp.size
        self._places = p2p.RankSlots(first=groups.tp.rank * slots, apart=column * slots, of_each=slots)

    def prepare(self, tokens: RoutedTokens, table: ExpertMap, of_ranks: Sequence[int] | None) -> Served:
        if of_ranks is not None or not p2p.supports_dispatch(tokens, self._group.memory):
            return self._otherwise.prepare(tokens, table, of_ranks)
        brought = p2p.dispatch(tokens, table, self._places, self._group.memory)
        return Served(brought.hidden, brought.expert_ids, brought.weights, len(tokens.hidden), visits=brought.visits)

    def finalize(self, partial: Tensor, served: Served) -> Tensor:
        if served.visits is None or not p2p.supports(p2p.Op.COMBINE, partial, self._group.memory):
            return self._otherwise.finalize(partial, served)
        return p2p.combine(partial, served.visits, self._group.memory)


class AllToAll(ExpertDispatch):
    """Each rank sends a part of the tokens that it shares with its TP group, once to every rank with experts of theirs.

    The CPU has to know the counts, so it waits for the routing of every layer.
    """

    def __init__(self, groups: ParallelGroups, placement: ExpertPlacement) -> None:
        self._tp = groups.tp
        self._ep = groups.ep
        self._slots = placement.slots

    def prepare(self, tokens: RoutedTokens, table: ExpertMap, of_ranks: Sequence[int] | None) -> Served:
        num_own, size = len(tokens.hidden), self._ep.size
        places = map_experts(tokens.expert_ids, table, places=range(size * self._slots), counted=range(num_own))
        first, end = (num_own * part // self._tp.size for part in (self._tp.rank, self._tp.rank + 1))
        hidden, places, weights = tokens.hidden[first:end], places[first:end], tokens.weights[first:end]
        ranks = torch.where(places < 0, -1, places // self._slots)
        goes = (ranks[:, None] == torch.arange(size, device=ranks.device)[:, None]).any(2)  # [n, size]
        to, token = goes.T.nonzero(as_tuple=True)  # by rank, then by token
        counts = goes.sum(0)
        received_counts = self._ep.all_to_all(counts, [1] * size, [1] * size)
        sent, received = counts.tolist(), received_counts.tolist()
        there = torch.where(ranks[token] == to[:, None], places[token] % self._slots, -1)
        came = RoutedTokens(hidden[token], there, weights[token]).through(
            lambda packed: self._ep.all_to_all(packed, sent, received)
        )
        handle = DispatchHandle(sent, received, first, _parts(goes, places.shape[1]))
        return Served(came.hidden, came.expert_ids.contiguous(), came.weights.contiguous(), num_own, handle)

    def finalize(self, partial: Tensor, served: Served) -> Tensor:
        handle = served.handle
        assert handle is not None, "tokens that this dispatch has not prepared"
        back = self._ep.all_to_all(partial, handle.received, handle.sent)
        back = torch.cat((back, back.new_zeros(1, back.shape[1])))  # a zero row, for ranks to which a token did not go
        total = back.new_zeros(served.num_own, back.shape[1])
        own = total[handle.first : handle.first + len(handle.parts)]
        summed = torch.zeros(own.shape, dtype=torch.promote_types(own.dtype, torch.float32), device=own.device)
        for rows in handle.parts.unbind(1):  # in rank order, so that the bits are the same every time
            summed += back[rows]
        own.copy_(summed)
        return total


def _parts(goes: Tensor, most: int) -> Tensor:
    """Return the rows of each token among all that are sent, ordered by rank and then by token: [n, most].

    `goes` [n, ranks] says which token goes to which rank. Unused entries are the number of rows sent.
    """
    num_tokens, num_ranks = goes.shape
    order = goes.T.flatten().cumsum(0).view(num_ranks, num_tokens).T - 1
    rows = torch.where(goes, order, goes.sum())
    return rows.sort(dim=1).values[:, :most]


@dataclass(frozen=True)
class Dispatches:
    """The dispatch methods of one layer."""

    captured: ExpertDispatch  # for steps in which all ranks run the same size
    eager: ExpertDispatch

    @classmethod
    def of(cls, groups: ParallelGroups, placement: ExpertPlacement, backend: str) -> Dispatches:
        """Choose the methods. `backend`, one of `groups.ALL2ALL_BACKENDS`, is used in eager steps."""
        if groups.dp.size == 1:
            return cls(*[Replicated(groups, placement)] * 2)
        gather = GatherScatter(groups, placement)
        captured = OverPeers(groups, placement, groups.dp) if isinstance(groups.dp, SymmetricGroup) else gather
        return cls(captured, gather if backend == "allgather_reducescatter" else AllToAll(groups, placement))

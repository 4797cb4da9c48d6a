"""A mixture of experts: many routed experts, of which each token goes to a few, and shared experts for every token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.parallel.dispatch import Dispatches
from baton.engine.parallel.groups import ALONE, ExpertSpread, Group, ParallelGroups
from baton.engine.parallel.placement import ExpertPlacement
from baton.kernels.activation import gate_heads
from baton.kernels.expert_map import ExpertMap
from baton.kernels.linear import RowNorm
from baton.kernels.p2p import RoutedTokens

from .base import Layer, Share
from .experts import ExpertRouter, Experts
from .linear import Linear
from .mlp import MLP, FeedForward, GatedMLP
from .step_context import TokenRows


class MoE(FeedForward):
    """shared(x) + the weighted sum of the experts that `gate(x)` chooses.

    Checkpoints name the parts `gate`, `experts` (see `layers.plain_experts`) and `shared_experts`, or as `names` maps
    them. With `gated_expert`, the shared part is one `shared_expert`, and its output is multiplied by
    sigmoid(x @ shared_expert_gate). The caller may pass its own block for the shared experts (`shared`) and for `gate`
    (`router`). With a `latent_size`, routed experts compute fc2_latent_proj(experts(fc1_latent_proj(x))).
    """

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        *,
        names: Mapping[str, str] | None = None,
        gated_expert: bool = False,
        shared: GatedMLP | None = None,
        router: ExpertRouter | None = None,
    ) -> None:
        self.gate = router or ExpertRouter(hidden_size, config)
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        if config.latent_size is not None:
            self.fc1_latent_proj = Linear(hidden_size, config.latent_size)
            self.fc2_latent_proj = Linear(config.latent_size, hidden_size)
        self.experts = Experts(config.latent_size or hidden_size, config)
        shared_size = config.shared_intermediate_size
        self.shared_experts: GatedMLP | MLP | None = shared
        if shared is None and shared_size:
            self.shared_experts = (GatedMLP if config.is_gated else MLP)(hidden_size, shared_size)
        self.spread: SpreadExperts | None = None  # None: every expert is here, or a part of its width
        self._group: Group = ALONE  # the group that results are summed over
        self.shared_expert_gate = Linear(hidden_size, 1) if gated_expert else None
        self._names = dict(names or {})  # names of children in checkpoints, if other than their attributes
        if gated_expert:
            self._names["shared_experts"] = "shared_expert"

    def children(self) -> Iterator[tuple[str, Layer]]:
        for name, child in super().children():
            yield self._names.get(name, name), child

    def divide(self, groups: ParallelGroups) -> None:
        """Divide the width of the shared experts over the tensor-parallel ranks, and the routed experts, too.

        With expert parallelism, each rank holds some whole routed experts; otherwise a part of every expert's width.
        """
        self._group = groups.tp
        if groups.spread is not None and groups.ep.size > 1:
            self.spread = SpreadExperts(self.experts, groups, groups.spread, self.gate.rule.top_k)
        else:
            self.experts.keep_width(Share.part(self.experts.shape.width.size, groups.tp))
        if self.shared_experts is not None:
            self.shared_experts.divide_over(groups.tp, summed=False)

    def allocate(self, device: torch.device | str, dtype: torch.dtype) -> None:
        super().allocate(device, dtype)
        if self.spread is not None:
            self.spread.allocate(device)

    def __call__(
        self, hidden: Tensor, rows: TokenRows, *, norm: RowNorm | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        normed = hidden if norm is None else norm(hidden)
        expert_ids, weights = self.gate(hidden if self.gate.norms_hidden else normed, rows.slots)
        hidden = normed
        add_to = self._with_shared(hidden, add_to)
        if self.fc1_latent_proj is None or self.fc2_latent_proj is None:
            return self._group.all_reduce(self._routed(hidden, expert_ids, weights, rows, add_to))
        # fc2 is linear: each rank applies it to its partial sum, so that one all-reduce sums routed and shared experts.
        latents = self._routed(self.fc1_latent_proj(hidden), expert_ids, weights, rows, None)
        return self._group.all_reduce(self.fc2_latent_proj(latents, add_to=add_to))

    def _routed(
        self, hidden: Tensor, expert_ids: Tensor, weights: Tensor, rows: TokenRows, add_to: Tensor | None
    ) -> Tensor:
        """Return the output of this rank's routed experts, plus `add_to`."""
        if self.spread is None:
            return self.experts(hidden, expert_ids, weights, add_to)
        return self.spread(hidden, expert_ids, weights, rows.of_ranks, add_to)

    def _with_shared(self, hidden: Tensor, add_to: Tensor | None) -> Tensor | None:
        """Return `add_to` (on the first rank only) plus the output of this rank's part of the shared experts."""
        if self.shared_experts is not None and self.shared_expert_gate is None:
            return self.shared_experts(hidden, add_to=add_to)
        if self._group.rank > 0:
            add_to = None
        if self.shared_experts is None or self.shared_expert_gate is None:
            return add_to
        shared, gate = self.shared_experts(hidden), self.shared_expert_gate(hidden)
        return gate_heads(shared[:, None], gate[:, None], add_to).flatten(1)


class SpreadExperts:
    """Experts under expert parallelism: this rank holds some, other ranks the others.

    The placement may change while serving. `placement`, `table` and the weights always agree with each other.
    """

    def __init__(self, experts: Experts, groups: ParallelGroups, spread: ExpertSpread, top_k: int) -> None:
        """Remove the experts of other ranks from `experts`. Must be called before memory is allocated."""
        self.experts = experts
        self._top_k = top_k
        self._one_of_each_rank = (1,) * groups.dp.size
        self.placement = ExpertPlacement.initial(experts.held.whole, spread.num_redundant, groups.ep.size)
        self.dispatches = Dispatches.of(groups, self.placement, spread.backend)
        self._table: ExpertMap | None = None
        experts.keep_experts(self.placement.held[groups.ep.rank])

    @property
    def table(self) -> ExpertMap:
        assert self._table is not None, "allocate() comes before the first step"
        return self._table

    def allocate(self, device: torch.device | str) -> None:
        placement = self.placement
        self._table = ExpertMap.empty(placement.num_experts, placement.most_replicas, device)
        self._table.write(placement.replicas())

    def warm_up(self, dtype: torch.dtype) -> None:
        """Launch the kernels of the eager dispatch, with one token without experts. All ranks call it.

        Captured steps may use another dispatch, so they do not cover these kernels.
        """
        device, shape = self.table.places.device, (1, self._top_k)
        token = RoutedTokens(
            torch.zeros(1, self.experts.shape.hidden_size, dtype=dtype, device=device),
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
        )
        served = self.dispatches.eager.prepare(token, self.table, self._one_of_each_rank)
        self.dispatches.eager.finalize(torch.zeros_like(served.hidden, memory_format=torch.contiguous_format), served)

    def place(self, placement: ExpertPlacement) -> None:
        """Record a new placement of experts. The caller has already moved their weights."""
        self.placement = placement
        self.table.write(placement.replicas())

    def __call__(
        self,
        hidden: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        of_ranks: tuple[int, ...] | None,
        add_to: Tensor | None,
    ) -> Tensor:
        """Compute the same as `Experts`; the caller still sums over the tensor-parallel ranks with the same tokens."""
        dispatch = self.dispatches.captured if of_ranks is None else self.dispatches.eager
        served = dispatch.prepare(RoutedTokens(hidden, expert_ids, weights), self.table, of_ranks)
        if dispatch.is_local:
            return self.experts(served.hidden, served.expert_ids, served.weights, add_to)
        partial = self.experts(served.hidden, served.expert_ids, served.weights, None)
        total = dispatch.finalize(partial, served)
        return total if add_to is None else add_to.add_(total)

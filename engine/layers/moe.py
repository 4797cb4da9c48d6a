"""A feed-forward layer of many experts, of which each token goes to a few, and some that serve every token."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from baton.engine.models.experts import ExpertsConfig
from baton.kernels.linear import RowNorm
from baton.kernels.moe import RoutingRule, fused_experts, route, router_logits

from .base import Layer, Parameter, Slot, join
from .mlp import FeedForward, GatedMLP


class MoE(FeedForward):
    """shared(x) + the weighted sum of the experts that `gate(x)` chooses.

    In the checkpoint `gate`, `experts.0`, `experts.1`, ..., and `shared_experts` where there are any.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        self.gate = Router(hidden_size, config.num_experts)
        self.experts = Experts(hidden_size, config.intermediate_size, config.num_experts)
        shared_size = config.shared_intermediate_size
        self.shared_experts = GatedMLP(hidden_size, shared_size) if shared_size else None
        self.rule = RoutingRule(
            config.top_k, config.scoring, config.renormalize, config.scale, config.num_groups, config.top_groups
        )

    def __call__(
        self, hidden: Tensor, slots: Tensor, *, norm: RowNorm | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        if norm is not None:
            hidden = norm(hidden)
        expert_ids, weights = route(self.gate(hidden), self.rule, slots=slots)
        if self.shared_experts is not None:
            add_to = self.shared_experts(hidden, add_to=add_to)
        return self.experts(hidden, expert_ids, weights, add_to)


class Router(Layer):
    """How well each expert suits each token: [T, hidden_size] -> logits [T, num_experts] float32."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        self.weight = Parameter(num_experts, hidden_size)

    def __call__(self, hidden: Tensor) -> Tensor:
        return router_logits(hidden, self.weight.data)


class Experts(Layer):
    """Gated MLPs of one shape, stacked; gates and ups row by row next to each other, as `fused_experts` reads them."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int) -> None:
        self.gate_up = Parameter(num_experts, 2 * intermediate_size, hidden_size)
        self.down = Parameter(num_experts, hidden_size, intermediate_size)

    def __call__(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor, add_to: Tensor | None) -> Tensor:
        """What the experts of each token give, added to `add_to` in place where there is one.

        hidden [T, hidden_size], expert_ids and weights [T, top_k] -> [T, hidden_size].
        """
        return fused_experts(hidden, self.gate_up.data, self.down.data, expert_ids, weights, add_to=add_to)

    def slots(self, path: str = "") -> Iterator[Slot]:
        num_experts, twice_size, _ = self.gate_up.shape
        for expert in range(num_experts):
            own = join(path, str(expert))
            for start, name in enumerate(("gate_proj", "up_proj")):
                rows = twice_size // 2
                yield Slot(f"{own}.{name}.weight", self.gate_up, start, rows, step=2, item=expert)
            yield Slot(f"{own}.down_proj.weight", self.down, item=expert)

"""The experts of a mixture of experts, and the router that chooses among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.hf_config.experts import ExpertsConfig
from baton.kernels.activation import Activation, Pointwise
from baton.kernels.linear import PackedWeight
from baton.kernels.moe import GatedActivation, RoutingRule, pack_router, route, router_logits
from baton.kernels.rms_norm import rms_norm

from .base import Held, Layer, Parameter, Share, Slot, StackSlot, join
from .method import ExpertsMethod, ExpertsShape, PackedExperts
from .mxfp4 import Mxfp4Experts
from .plain_experts import STACKS, PlainExperts


class ExpertRouter(Layer):
    """Chooses the experts of each token and the weight of each expert's output."""

    norms_hidden = False  # true: the router norms its input itself, instead of reading the experts' normed input

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        wide = torch.float32 if config.wide_router else None
        self.weight = Parameter(config.num_experts, hidden_size, dtype=wide)
        self.bias = Parameter(config.num_experts) if config.router_bias else None
        # Added to the scores when experts are chosen, not to their weights: it evens out the experts' loads
        # (DeepSeek-V3, arXiv:2412.19437).
        shape = (1, config.num_experts) if config.correction_is_row else (config.num_experts,)
        self.e_score_correction_bias = Parameter(*shape, dtype=torch.float32) if config.score_correction else None
        self.rule = RoutingRule(
            config.top_k,
            config.scoring,
            config.renormalize,
            config.scale,
            config.num_groups,
            config.top_groups,
            config.group_score,
        )
        self._packed: Tensor | PackedWeight | None = None

    def finish(self) -> None:
        super().finish()
        self._packed = pack_router(self.weight.data)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return a logit for each expert: hidden [T, hidden_size] -> [T, num_experts] float32."""
        assert self._packed is not None, "finish() comes before the first call"
        return router_logits(hidden, self._packed, _data(self.bias))

    def __call__(self, hidden: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert ids [T, top_k] int32 and their weights [T, top_k] float32 for hidden [T, hidden_size].

        Tokens with slot -1 in `slots` [T] int64 are padding: their expert ids are -1.
        """
        logits = self.logits(hidden)
        bias = _data(self.e_score_correction_bias)
        return route(logits, self.rule, bias=None if bias is None else bias.view(-1), slots=slots)


class NormedRouter(ExpertRouter):
    """The router of Gemma 4: it RMS-norms hidden states, and has a scale for each hidden dimension and each expert.

    logits = proj(hidden / rms(hidden) * scale / sqrt(hidden_size))
    weights = softmax over the chosen experts' logits, times their per_expert_scale
    """

    norms_hidden = True

    def __init__(self, hidden_size: int, config: ExpertsConfig, eps: float) -> None:
        super().__init__(hidden_size, config)
        self.scale = Parameter(hidden_size, typical=1.0, dtype=torch.float32)
        self.per_expert_scale = Parameter(config.num_experts, typical=1.0, dtype=torch.float32)
        self._eps = eps

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        for name, parameter in super().parameters():
            yield "proj.weight" if parameter is self.weight else name, parameter

    def finish(self) -> None:
        super().finish()
        self.scale.data.mul_(len(self.scale.data) ** -0.5)

    def __call__(self, hidden: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms_norm(hidden, self.scale.data, self._eps)
        assert isinstance(normed, Tensor)
        logits = self.logits(normed)
        return route(logits, self.rule, expert_scale=self.per_expert_scale.data, slots=slots)


class Experts(Layer):
    """The experts of a layer: MLPs of one shape, gated or not.

    An `ExpertsMethod` (`layers.method`) defines how their matrices are stored, held in memory and multiplied.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        num_experts, width = config.num_experts, config.intermediate_size
        self.shape = ExpertsShape(
            Held(range(num_experts), num_experts), Share.all(width), hidden_size, config.projections
        )
        self.gate_up_bias = Parameter(num_experts, self.shape.parts * width) if config.expert_biases else None
        self.down_bias = Parameter(num_experts, hidden_size) if config.expert_biases else None
        self.activation: GatedActivation | Pointwise
        if config.is_gated:
            gate = Activation(config.gate)
            self.activation = GatedActivation(config.gate_slope, config.gate_limit, config.up_shift, gate)
        else:
            self.activation = Pointwise.RELU2
        self.stored = config.stored
        self._packed: PackedExperts | None = None
        self.use(Mxfp4Experts() if config.stored == "mxfp4" else PlainExperts(config.stored))

    def use(self, method: ExpertsMethod) -> None:
        """Store, hold and multiply the matrices by this method. Must be called before `allocate`."""
        self.method = method
        self.weights = method.declare(self.shape)

    @property
    def held(self) -> Held:
        return self.shape.held

    def keep_width(self, share: Share) -> None:
        """Compute only this part of every expert's intermediate width; the caller sums the outputs over the ranks."""
        self.shape = replace(self.shape, width=share)
        self.use(self.method)
        if self.gate_up_bias is not None:
            self.gate_up_bias.keep(1, share.times(self.shape.parts))

    def keep_experts(self, held: Sequence[int]) -> None:
        """Hold only these experts, each once, in this order. From then on, `expert_ids` are indices in `held`."""
        self.shape = replace(self.shape, held=Held(held, self.held.whole))
        self.use(self.method)
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                bias.keep(0, self.held.places)

    def parts_at(self, path: str) -> list[str]:
        """Return the names of the checkpoint's linear layers, or stacks of matrices, behind this layer at `path`."""
        if self.stored != "each":
            return [join(path, name) for name in STACKS[self.stored]]
        names = self.shape.projections
        return [join(path, f"{expert}.{name}") for expert in range(self.held.whole) for name in names]

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self.weights.items()
        yield from super().parameters()

    def __call__(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor, add_to: Tensor | None) -> Tensor:
        """See `PackedExperts.multiply`."""
        assert self._packed is not None, "finish() comes before the first call"
        return self._packed.multiply(hidden, expert_ids, weights, add_to)

    def finish(self) -> None:
        adds_bias = self.shape.width.start == 0  # only the rank with the first part of the width adds it
        self._packed = self.method.pack(
            {name: parameter.data for name, parameter in self.weights.items()},
            gate_up_bias=_data(self.gate_up_bias),
            down_bias=_data(self.down_bias) if adds_bias else None,
            activation=self.activation,
        )

    def slots(self, path: str = "") -> Iterator[Slot]:
        yield from self.method.slots(self.shape, self.weights, path)
        for name, bias in (("gate_up_proj_bias", self.gate_up_bias), ("down_proj_bias", self.down_bias)):
            if bias is not None:
                yield StackSlot(join(path, name), bias, self.held)


def _data(parameter: Parameter | None) -> Tensor | None:
    return None if parameter is None else parameter.data

"""A mixture of experts: the routing rule, the experts' weights, and the activation between their two products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.activation import Activation, Pointwise

BLOCK = 128  # rows and columns of an FP8 matrix that share a scale


@dataclass(frozen=True)
class RoutingRule:
    """The choice of a token's experts, and the weight of each one's output.

        score    softmax over all experts' logits, or sigmoid of each
        choice   score + bias, for experts in the best `top_groups` of `num_groups` groups of consecutive experts
        experts  the `top_k` experts with the highest choice; of equal ones the first
        weight   the expert's score; with `renormalize`, divided by the sum over the token's experts; times `scale`

    Raises `ValueError` for contradictory numbers.
    """

    top_k: int
    scoring: str = "softmax"  # or "sigmoid"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"  # rating of a group: "max": its best choice; "top2": the sum of its two best

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid") or self.group_score not in ("max", "top2"):
            raise ValueError(f"scoring {self.scoring!r} or group_score {self.group_score!r} is unknown")
        if not (self.top_k >= 1 and 1 <= self.top_groups <= self.num_groups):
            raise ValueError(f"{self}: top_k must be at least 1, top_groups from 1 to num_groups")

    def check(self, num_experts: int) -> None:
        """Raise `ValueError` if the rule does not fit this number of experts."""
        group_size = num_experts // self.num_groups
        if num_experts % self.num_groups or self.top_k > group_size * self.top_groups:
            raise ValueError(f"{num_experts} experts do not fit {self}: groups must be equal and hold top_k experts")
        if self.num_groups > 1 and self.group_score == "top2" and group_size < 2:
            raise ValueError(f"{num_experts} experts do not fit {self}: a group has one expert, top2 needs two")


@dataclass(frozen=True)
class GatedActivation:
    """(up + shift) * gate * sigmoid(slope * gate); with a limit, gate is clamped to at most `limit`, up to +-limit.

    The defaults are silu(gate) * up. gpt-oss (arXiv:2508.10925) has slope 1.702, limit 7 and shift 1. With another
    `gate`, it is (up + shift) * gate_activation(gate), as in Gemma 4, and has no slope.
    """

    slope: float = 1.0
    limit: float | None = None
    shift: float = 0.0
    gate: Activation = Activation.SILU

    def __post_init__(self) -> None:
        if self.slope != 1.0 and self.gate is not Activation.SILU:
            raise ValueError(f"{self}: only silu has a slope")

    @property
    def is_plain(self) -> bool:
        """True if it is just activation(gate) * up, without slope, limit or shift."""
        return self == GatedActivation(gate=self.gate)


SILU = GatedActivation()


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of E experts of width F: `down(activation(gate(x), up(x)))`, or `down(activation(up(x)))`.

    Without gates, `gate_up` is [E, F, H] and has the up matrices only.

    Rows of gates and ups are interleaved: row 2 i of an expert's `gate_up` is row i of its gate, row 2 i + 1 is row i
    of its up matrix. 8-bit weights (float8_e4m3fn) have scales, by which they are multiplied: one for each 128 x 128
    values of a gate, up or down matrix. Scales of gates and ups are interleaved, too. Raises `ValueError` for shapes
    that do not match.
    """

    gate_up: Tensor  # [E, 2 F, H]
    down: Tensor  # [E, H, F]
    gate_up_bias: Tensor | None = None  # [E, 2 F]
    down_bias: Tensor | None = None  # [E, H]
    activation: GatedActivation | Pointwise = SILU
    gate_up_scale: Tensor | None = None  # float32 [E, 2 ceil(F / 128), ceil(H / 128)]; without gates, half as many rows
    down_scale: Tensor | None = None  # float32 [E, ceil(H / 128), ceil(F / 128)]
    gate_up_in_panels: bool = False  # on a CPU: each matrix is in panels, in the same memory (`cpu.pack_in_place`)
    down_in_panels: bool = False

    def __post_init__(self) -> None:
        num_experts, rows, hidden_size = self.gate_up.shape
        if self.down.shape != (num_experts, hidden_size, rows // self.parts) or rows % self.parts:
            raise ValueError(
                f"gate_up {list(self.gate_up.shape)} and down {list(self.down.shape)} do not fit: "
                f"give [E, {'2 F' if self.is_gated else 'F'}, H] and [E, H, F]"
            )
        for name, bias, weight in (
            ("gate_up_bias", self.gate_up_bias, self.gate_up),
            ("down_bias", self.down_bias, self.down),
        ):
            if bias is not None and bias.shape != weight.shape[:2]:
                raise ValueError(f"{name} is {list(bias.shape)}: give {list(weight.shape[:2])}")

        if (self.gate_up_scale is None) == self.in_8_bits or (self.down_scale is None) == self.in_8_bits:
            raise ValueError(f"weights in {self.down.dtype}: give scales for float8_e4m3fn, and for nothing else")
        if self.gate_up_scale is not None and self.down_scale is not None:
            width_blocks, hidden_blocks = -(-self.width // BLOCK), -(-self.hidden_size // BLOCK)
            upper_blocks = self.parts * width_blocks
            expected = (num_experts, upper_blocks, hidden_blocks), (num_experts, hidden_blocks, width_blocks)
            given = tuple(self.gate_up_scale.shape), tuple(self.down_scale.shape)
            if given != expected:
                raise ValueError(f"scales are {given[0]} and {given[1]}: give {expected[0]} and {expected[1]}")

    def matrices(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return an expert's dequantized `gate_up` [2 F, H] (without gates [F, H]) and `down` [H, F]."""
        gate_up, down = self.gate_up[expert], self.down[expert]
        if self.gate_up_scale is None or self.down_scale is None:
            return gate_up.to(dtype), down.to(dtype)
        of_parts = self.gate_up_scale[expert].unflatten(0, (-1, self.parts)).transpose(0, 1)  # gates' scales, ups'
        expanded = [_expand_scales(scales, self.width, self.hidden_size) for scales in of_parts]
        scales = torch.stack(expanded, dim=1).flatten(0, 1)
        down_scales = _expand_scales(self.down_scale[expert], self.hidden_size, self.width)
        return (gate_up.float() * scales).to(dtype), (down.float() * down_scales).to(dtype)

    @property
    def is_gated(self) -> bool:
        return isinstance(self.activation, GatedActivation)

    @property
    def parts(self) -> int:
        """The rows of `gate_up` for each value of an expert's width: 2 (gate and up), or 1 without gates."""
        return 2 if self.is_gated else 1

    @property
    def in_8_bits(self) -> bool:
        return self.down.dtype == torch.float8_e4m3fn

    @property
    def num_experts(self) -> int:
        return self.down.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.down.shape[1]

    @property
    def width(self) -> int:
        return self.down.shape[2]


def _expand_scales(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Expand per-block scales to per-value scales [rows, columns]."""
    return scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]

"""The functions of a gate that a norm's result, or what is normed, is multiplied with."""

from __future__ import annotations

import enum


class Gating(enum.Enum):
    """SILU: x * sigmoid(x) (Gated DeltaNet, Mamba-2); SIGMOID: sigmoid(x) (Kimi Delta Attention)."""

    SILU = "silu"
    SIGMOID = "sigmoid"

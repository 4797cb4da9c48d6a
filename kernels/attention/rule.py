"""The attention rule of a layer: scale, window, cap, sinks and cache scales, made once when the weights are loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

UNLIMITED = 2**31 - 1  # `limit` without a window
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class AttentionRule:
    """The formula of one layer's attention: visible keys, weights from scores, scales of cached keys and values.

        score    scale * q k, with k = k_scale * stored key; then soft_cap * tanh(score / soft_cap)
        weight   e^score / (sum of e^score over the visible keys + e^sink of the query's head)
        visible  the newest `window` keys up to the query's own, which is counted
        result   sum of weight * v, with v = v_scale * stored value

    Raises `ValueError` for an invalid window or cap, and `TypeError` for a tensor of another dtype or shape than
    stated, since kernels read tensors by address.
    """

    scale: float
    window: int | None = None  # None: all keys up to the query's own
    soft_cap: float | None = None
    sinks: Tensor | None = None  # [query heads] float32; None: weights of keys sum to 1
    k_scale: Tensor | None = None  # [] or [1] float32, for a cache in float8_e4m3fn; None: 1
    v_scale: Tensor | None = None  # as k_scale

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}: give at least 1 (a query sees itself), or None for no limit")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap is {self.soft_cap}: give more than 0, or None for no cap")
        for name in ("sinks", "k_scale", "v_scale"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            if tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise TypeError(f"{name} is {tensor.dtype} with stride {tensor.stride()}: give contiguous float32")
            if name != "sinks" and tensor.numel() != 1:
                raise TypeError(f"{name} has shape {list(tensor.shape)}: give one value for the whole layer")

    def check_heads(self, num_heads: int) -> None:
        """Raise `ValueError` if the number of sinks is not the number of query heads."""
        if self.sinks is not None and self.sinks.shape != (num_heads,):
            raise ValueError(f"sinks has shape {list(self.sinks.shape)}: give one for each of {num_heads} query heads")

    @property
    def is_scaled(self) -> bool:
        """True if keys or values are stored divided by a scale."""
        return self.k_scale is not None or self.v_scale is not None

    @property
    def has_window(self) -> bool:
        return self.window is not None

    @property
    def has_cap(self) -> bool:
        return self.soft_cap is not None

    @cached_property
    def limit(self) -> int:
        """The window as a number; `UNLIMITED` without a window."""
        return UNLIMITED if self.window is None else self.window

    @cached_property
    def cap(self) -> float:
        """The cap as a number; without a cap 0, which kernels do not read."""
        return self.soft_cap or 0.0

    # Prefill kernels combine the constants: weights are 2^(score_unit * s) divided by their sum, where s = q k or,
    # with a cap, s = tanh(q k * scale / cap), and tanh(x) = 1 - 2 / (e^2x + 1) = 1 - 2 / (2^(cap_scale * q k) + 1).

    @cached_property
    def score_unit(self) -> float:
        return (self.scale if self.soft_cap is None else self.soft_cap) * LOG2_E

    @cached_property
    def cap_scale(self) -> float:
        """The factor in the cap's exponent; without a cap 0, which kernels do not read."""
        return 0.0 if self.soft_cap is None else 2 * LOG2_E * self.scale / self.soft_cap

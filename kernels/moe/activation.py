"""What stands between the two products of an expert: a value that a model's config fixes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GatedActivation:
    """(up + shift) * gate * sigmoid(slope * gate), with gate at most `limit` and up within +-limit where there is one.

    As it is: silu(gate) * up. gpt-oss (arXiv:2508.10925) has slope 1.702, limit 7 and shift 1.
    """

    slope: float = 1.0
    limit: float | None = None
    shift: float = 0.0


SILU = GatedActivation()

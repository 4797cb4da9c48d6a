"""A plan of fleets, and samples of their load."""

from __future__ import annotations

import msgspec

from baton.cluster.contracts import Bounds, Role, ScalePlan

P, D, U = Role.PREFILL, Role.DECODE, Role.UNIFIED
PLAN = ScalePlan(
    fleets={P: Bounds(1, 8), D: Bounds(1, 8)},
    ttft_s=1.0,
    inter_token_s=0.05,
    percentile=0.9,
    target_utilization=0.5,
    look_back_period_s=10.0,
    upscale_delay_s=4.0,
    downscale_delay_s=20.0,
    downscale_to_zero_delay_s=30.0,
)
UNIFIED = msgspec.structs.replace(PLAN, fleets={U: Bounds(1, 4)}, downscale_to_zero_delay_s=3.0)

"""What an operator may say about autoscaling. Names that Ray Serve's `autoscaling_config` has, too, mean the same."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AutoscalingSettings(BaseModel):
    """Targets of the application, and how soon it follows them; how many groups there may be is the fleets' to say."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_s: float = Field(1.0, gt=0)  # from the request to its first token
    inter_token_s: float = Field(0.05, gt=0)  # between the tokens of an answer
    percentile: float = Field(0.9, gt=0, lt=1)  # share of the requests and tokens for which the targets hold
    target_utilization: float = Field(0.7, gt=0, le=1)  # of what a group can do within the targets
    look_back_period_s: float = Field(30.0, ge=5)  # over which rates and latencies are measured
    upscale_delay_s: float = Field(5.0, ge=0)  # for which more must be wanted before more come; the first at once
    downscale_delay_s: float = Field(300.0, ge=0)
    downscale_to_zero_delay_s: float | None = Field(None, ge=0)  # without requests; by default `downscale_delay_s`

"""The routing rule of a model: how router logits become experts and their weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoutingRule:
    """The choice of a token's experts, and the weight of each one's output.

        score    softmax or sigmoid of the logits, over all experts
        choice   score + bias, of the experts in the best `top_groups` of `num_groups` groups of neighbours
        experts  the `top_k` of the highest choice; of equal ones the first
        weight   the expert's score; divided by the sum over the token's experts where `renormalize`; times `scale`

    Raises `ValueError` for numbers that contradict each other.
    """

    top_k: int
    scoring: str = "softmax"  # or "sigmoid"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"  # of a group: its best choice, or "top2": the sum of its two best

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid") or self.group_score not in ("max", "top2"):
            raise ValueError(f"scoring {self.scoring!r} or group_score {self.group_score!r} is unknown")
        if not (self.top_k >= 1 and 1 <= self.top_groups <= self.num_groups):
            raise ValueError(f"{self}: top_k must be at least 1, top_groups from 1 to num_groups")

    def check(self, num_experts: int) -> None:
        """Raise `ValueError` where so many experts cannot be routed to by this rule."""
        group_size = num_experts // self.num_groups
        if num_experts % self.num_groups or self.top_k > group_size * self.top_groups:
            raise ValueError(f"{num_experts} experts do not fit {self}: groups must be equal and hold top_k experts")
        if self.num_groups > 1 and self.group_score == "top2" and group_size < 2:
            raise ValueError(f"{num_experts} experts do not fit {self}: a group has one expert, top2 needs two")

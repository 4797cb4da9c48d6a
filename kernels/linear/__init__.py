"""A linear layer over a weight that was packed once, for the device that it lives on."""

from .layer import gated_linear, linear
from .norm import RowNorm
from .packed import PackedWeight, pack

__all__ = ["PackedWeight", "RowNorm", "gated_linear", "linear", "pack"]

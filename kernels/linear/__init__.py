"""A linear layer over a weight that was packed once, for the device that it lives on."""

from .packed import PackedWeight, linear, pack

__all__ = ["PackedWeight", "linear", "pack"]

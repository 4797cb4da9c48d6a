"""Checkpoint tensors that are stacks [items, ...] of which a rank may hold any items."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .base import Parameter, Share, Slot


class Held:
    """The items of a stack of `whole` that a rank holds, in the order of their places."""

    def __init__(self, items: Sequence[int], whole: int) -> None:
        assert len(set(items)) == len(items), "an item lies in one place of a rank"
        self.items = tuple(items)
        self.whole = whole
        first = min(items, default=0)
        self.places = Share(0, len(self.items), whole)  # of a parameter with a row each item
        self.share = Share(first, max(items, default=-1) + 1 - first, whole)  # the smallest that has all of them


class StackSlot(Slot):
    """The place of those items of a checkpoint's stack that are held."""

    __slots__ = ("_held",)

    def __init__(self, name: str, parameter: Parameter, held: Held) -> None:
        super().__init__(name, parameter)
        self.shares = (held.share, *parameter.shares[1:])
        self._held = held

    def _place(self, share: Tensor) -> None:
        for target, index in zip(self.parameter.data, self._held.items, strict=True):
            # To the device first: what is done to an item is done there.
            self._place_item(target, share[index - self._held.share.start].to(target.device))

    def _place_item(self, target: Tensor, item: Tensor) -> None:
        target.copy_(item)

"""Transfers by way of staging slots have an id of their own, and one of the connector below."""

from __future__ import annotations

import itertools

from baton.engine.core.connector import TransferId


class TransferIds:
    """Pairs of ids: ours, which the engine knows, and that of the connector below. Ours are never used twice."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._inner_of: dict[TransferId, TransferId] = {}
        self._own_of: dict[TransferId, TransferId] = {}

    def new(self) -> TransferId:
        return next(self._ids)

    def pair(self, own: TransferId, inner: TransferId) -> TransferId:
        """Remember a pair until `forget`. Returns `own`."""
        self._inner_of[own], self._own_of[inner] = inner, own
        return own

    def inner_of(self, own: TransferId) -> TransferId | None:
        """Return the id below; None if the transfer has not begun there, or is over."""
        return self._inner_of.get(own)

    def own_of(self, inner: TransferId) -> TransferId:
        return self._own_of[inner]

    def forget(self, own: TransferId) -> None:
        del self._own_of[self._inner_of.pop(own)]

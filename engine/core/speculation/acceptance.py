"""Estimates of how many drafts are accepted, from those that were accepted lately."""

from __future__ import annotations

from collections.abc import Iterable


class Acceptance:
    """The share of drafts that are accepted at each position, of those whose drafts before them were accepted.

    Older drafts count less: a share is the mean of about 1 / (1 - `kept`) drafts, and of a prior that weighs as much as
    `weight` drafts.
    """

    __slots__ = ("_accepted", "_checked", "_kept", "_weight")

    def __init__(self, most: int, kept: float, weight: float) -> None:
        """`most`: drafts of one request in a step."""
        self._checked = [0.0] * most
        self._accepted = [0.0] * most
        self._kept = kept
        self._weight = weight

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Note that the first `num_accepted` of so many drafts were right; those behind a wrong one tell nothing."""
        kept, checked, accepted = self._kept, self._checked, self._accepted
        for position in range(num_accepted):
            checked[position] = kept * checked[position] + 1
            accepted[position] = kept * accepted[position] + 1
        if num_accepted < num_drafts:
            checked[num_accepted] = kept * checked[num_accepted] + 1
            accepted[num_accepted] *= kept

    def shares(self, priors: Iterable[float]) -> list[float]:
        """Return the share at each position; `priors` are what is believed without any draft."""
        weight = self._weight
        return [
            (accepted + weight * prior) / (checked + weight)
            for checked, accepted, prior in zip(self._checked, self._accepted, priors, strict=True)
        ]

    def shares_from(self, prior: float) -> list[float]:
        """Return the share at each position, where the one before it is the prior of the next."""
        weight, shares = self._weight, []
        for checked, accepted in zip(self._checked, self._accepted, strict=True):
            prior = (accepted + weight * prior) / (checked + weight)
            shares.append(prior)
        return shares


def chances(shares: list[float]) -> list[float]:
    """Return for each position the chance that its draft and all before it are accepted."""
    chance, result = 1.0, []
    for share in shares:
        chance *= share
        result.append(chance)
    return result

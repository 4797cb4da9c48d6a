"""The share of drafts that are accepted, by their position."""

from __future__ import annotations

from collections.abc import Iterable


class Acceptance:
    """The share of drafts that are accepted at each position, among those whose earlier drafts were all accepted.

    Older drafts weigh less: a share is the mean over about 1 / (1 - `kept`) drafts and a prior with the weight of
    `weight` drafts.
    """

    __slots__ = ("_accepted", "_checked", "_kept", "_weight")

    def __init__(self, most: int, kept: float, weight: float) -> None:
        """Create it for at most `most` drafts of one request in a step."""
        self._checked = [0.0] * most
        self._accepted = [0.0] * most
        self._kept = kept
        self._weight = weight

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Note that the first `num_accepted` of `num_drafts` were right. Drafts after a wrong one tell nothing."""
        kept, checked, accepted = self._kept, self._checked, self._accepted
        for position in range(num_accepted):
            checked[position] = kept * checked[position] + 1
            accepted[position] = kept * accepted[position] + 1
        if num_accepted < num_drafts:
            checked[num_accepted] = kept * checked[num_accepted] + 1
            accepted[num_accepted] *= kept

    def shares(self, priors: Iterable[float]) -> list[float]:
        """Return the share at each position; `priors` are the shares assumed without any draft."""
        weight = self._weight
        return [
            (accepted + weight * prior) / (checked + weight)
            for checked, accepted, prior in zip(self._checked, self._accepted, priors, strict=True)
        ]

    def shares_from(self, prior: float) -> list[float]:
        """Return the share at each position. Each share is the prior of the next, and `prior` is that of the first."""
        weight, shares = self._weight, []
        for checked, accepted in zip(self._checked, self._accepted, strict=True):
            prior = (accepted + weight * prior) / (checked + weight)
            shares.append(prior)
        return shares


def chances(shares: list[float]) -> list[float]:
    """Return, for each position, the chance that the draft there and all before it are accepted."""
    chance, result = 1.0, []
    for share in shares:
        chance *= share
        result.append(chance)
    return result

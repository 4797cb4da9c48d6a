"""Counters of drafts. Names are those of vLLM's metrics."""

from __future__ import annotations

import operator

import msgspec


class SpeculationStats(msgspec.Struct, frozen=True):
    """Drafts that an engine has checked, counted from the process's start."""

    num_drafts: int = 0  # times that a request had drafts in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_pos: list[int] = []  # by the position of the draft in its step, up to the most drafts

    @property
    def acceptance_rate(self) -> float:
        """Return the share of drafts that were accepted; 0 before the first."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_length(self) -> float:
        """Return the tokens that a request drew in a step with drafts, on average; 1 before the first."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """The drafts of one request: in a step, or in several of them together."""

    num_drafts: int = 0  # times that it had drafts in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_predicted_tokens: int = 0  # those of the draft tokens that stand in the request's prediction
    num_accepted_predicted_tokens: int = 0

    @classmethod
    def of_step(cls, num_drafts: int, num_accepted: int, *, are_predicted: bool) -> DraftCounts:
        predicted = (num_drafts, num_accepted) if are_predicted else (0, 0)
        return cls(1, num_drafts, num_accepted, *predicted)

    @property
    def num_rejected_predicted_tokens(self) -> int:
        return self.num_predicted_tokens - self.num_accepted_predicted_tokens

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(*map(operator.add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))

    def within(self, num_tokens: int) -> DraftCounts:
        """Return the counts of a step of which the answer keeps the first `num_tokens` tokens only."""
        if self.num_accepted_tokens <= num_tokens:
            return self
        accepted_predicted = min(num_tokens, self.num_accepted_predicted_tokens)
        return self._with_accepted(num_tokens, accepted_predicted)

    def of_token(self, index: int) -> DraftCounts:
        """Return the share of a step's token in its counts: they add up to those of the tokens up to it."""
        rest = self if index == 0 else NO_DRAFTS
        return rest._with_accepted(index < self.num_accepted_tokens, index < self.num_accepted_predicted_tokens)

    def _with_accepted(self, num_tokens: int, num_predicted: int) -> DraftCounts:
        return msgspec.structs.replace(
            self, num_accepted_tokens=int(num_tokens), num_accepted_predicted_tokens=int(num_predicted)
        )


NO_DRAFTS = DraftCounts()


class SpeculationCounter:
    """Counts the drafts of one engine."""

    def __init__(self, most_drafts: int) -> None:
        """`most_drafts` of a request in a step."""
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted = [0] * (most_drafts + 1)  # chunks by the number of drafts accepted

    def settled(self, num_drafts: int, num_accepted: int) -> None:
        """Note that the first `num_accepted` of a request's drafts were right. Without drafts it counts nothing."""
        if num_drafts:
            self._num_drafts += 1
            self._num_draft_tokens += num_drafts
            self._accepted[num_accepted] += 1

    def stats(self) -> SpeculationStats:
        per_position, num_chunks = [], 0
        for count in reversed(self._accepted[1:]):
            num_chunks += count
            per_position.append(num_chunks)
        per_position.reverse()
        return SpeculationStats(self._num_drafts, self._num_draft_tokens, sum(per_position), per_position)

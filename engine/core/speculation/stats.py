"""Counters of drafts, under the names of vLLM's metrics."""

from __future__ import annotations

import operator

import msgspec


class SpeculationStats(msgspec.Struct, frozen=True):
    """Drafts that an engine has checked since its process started."""

    num_drafts: int = 0  # times that a request had drafts in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_pos: list[int] = []  # by the draft's position among those of its step

    @property
    def acceptance_rate(self) -> float:
        """The share of drafts that were accepted; 0 before the first."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_length(self) -> float:
        """The mean number of tokens that a request drew in a step with drafts; 1 before the first."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """The drafts of one request, in one step or in several together."""

    num_drafts: int = 0  # times that it had drafts in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_predicted_tokens: int = 0  # draft tokens that are part of the request's prediction
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
        """Return the counts of a step if the answer keeps only its first `num_tokens` tokens."""
        if self.num_accepted_tokens <= num_tokens:
            return self
        accepted_predicted = min(num_tokens, self.num_accepted_predicted_tokens)
        return self._with_accepted(num_tokens, accepted_predicted)

    def of_token(self, index: int) -> DraftCounts:
        """Return the part of a step's counts that token `index` stands for; the parts of its tokens add up to them."""
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
        """Create a counter for at most `most_drafts` drafts of a request in a step."""
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted = [0] * (most_drafts + 1)  # entry n: how often a request had n drafts accepted in a step

    def settled(self, num_drafts: int, num_accepted: int) -> None:
        """Note that the first `num_accepted` of a request's drafts were right. Without drafts, nothing is counted."""
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

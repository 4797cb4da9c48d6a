"""The contract between the scheduler and the drafter, which guesses the next tokens of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DraftedRequest:
    """The data of a request that a drafter gets at its start."""

    request_id: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int] = ()  # tokens already drawn
    cache_salt: str = ""  # only requests with the same salt may see each other's text
    prediction_token_ids: Sequence[int] = ()  # the answer that the client expects; used for this request alone


class Drafter(Protocol):
    """Guesses how requests continue. The scheduler's thread calls it between steps, so it must be quick.

    Guesses are a function of the earlier calls: two ranks that make the same calls get the same guesses. A request
    keeps its id when it is preempted and resumed. Calls with ids that were never started, or have ended, do nothing.
    """

    def start(self, request: DraftedRequest) -> None:
        """Start a request."""
        ...

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add the next tokens of the answer: drawn ones and accepted drafts, in order."""
        ...

    def propose(self, request_id: str, most: int) -> list[int]:
        """Return up to `most` guesses of the tokens after the known ones; an empty list if nothing suggests any."""
        ...

    def learn(self, answer: Sequence[int], cache_salt: str) -> None:
        """Learn from the answer of an ended request that was never started here. Only equal salts may use it."""
        ...

    def end(self, request_id: str) -> None:
        """Forget a request that has ended. Guesses for later requests may use its answer."""
        ...


class DeviceDrafter:
    """A stand-in for a drafter on the device, which guesses at the end of each step and need not be told of requests.

    It implements `Drafter`, and guesses nothing itself.
    """

    def start(self, request: DraftedRequest) -> None:
        pass

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        pass

    def propose(self, request_id: str, most: int) -> list[int]:
        return []

    def learn(self, answer: Sequence[int], cache_salt: str) -> None:
        pass

    def end(self, request_id: str) -> None:
        pass

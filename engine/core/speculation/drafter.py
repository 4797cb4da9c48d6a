"""The contract between the scheduler and what guesses the next tokens of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DraftedRequest:
    """A request as a drafter first sees it."""

    request_id: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int] = ()  # that it has already drawn
    cache_salt: str = ""  # only requests of the same salt may see each other's text
    prediction_token_ids: Sequence[int] = ()  # the answer that the client expects; used for this request alone


class Drafter(Protocol):
    """Guesses how requests go on. It is called on the scheduler's thread, between steps, so it must be quick.

    Guesses are a function of the calls before: two ranks that make the same calls get the same guesses. A request
    keeps its id while it is preempted and resumed. Calls for an id that was never started, or has ended, do nothing.
    """

    def start(self, request: DraftedRequest) -> None:
        """Begin a request."""
        ...

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Note the next tokens of the answer: drawn ones and accepted drafts, in order."""
        ...

    def propose(self, request_id: str, most: int) -> list[int]:
        """Guess up to `most` tokens that follow the known ones; empty where there is nothing to guess from."""
        ...

    def learn(self, answer: Sequence[int], cache_salt: str) -> None:
        """Note the answer of a request of this salt that is over and was never begun here, as an example for others."""
        ...

    def end(self, request_id: str) -> None:
        """Forget a request that is over. Its answer may serve as an example for later ones."""
        ...


class DeviceDrafter:
    """Stands for a drafter that works on the device, at the end of each step: it need not be told of requests.

    Implements `Drafter`, and guesses nothing here.
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

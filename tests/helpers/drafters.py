"""A drafter that knows the answers of requests, and errs in a share of its guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from baton.engine.core.speculation.drafter import DraftedRequest


class KnowingDrafter:
    """Guesses what a request will draw, from its undisturbed answer. Implements `Drafter`.

    `answer_to` returns all tokens of the request's prompt and answer. It errs in a share of `errors` of the positions,
    always in the same ones.
    """

    def __init__(
        self,
        answer_to: Callable[[str, Sequence[int]], Sequence[int]],
        errors: float,
        vocab_size: int,
        *,
        may_differ: bool = False,
    ) -> None:
        """`may_differ`: answers may be other ones than the known, as on a GPU. Then their rest is not guessed."""
        self._answer_to = answer_to
        self._may_differ = may_differ
        self._errors = errors
        self._vocab_size = vocab_size
        self._known: dict[str, list[int]] = {}  # prompt and output by request
        self._whole: dict[str, Sequence[int]] = {}

    @property
    def num_known(self) -> int:
        """The number of requests that it was told of and that are not over."""
        return len(self._known)

    def start(self, request: DraftedRequest) -> None:
        request_id, prompt = request.request_id, request.prompt_token_ids
        assert request_id not in self._known
        self._known[request_id] = [*prompt, *request.output_token_ids]
        self._whole[request_id] = self._answer_to(request_id, prompt)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._known[request_id] += token_ids

    def propose(self, request_id: str, most: int) -> list[int]:
        known, whole = self._known[request_id], self._whole[request_id]
        if known != whole[: len(known)]:
            assert self._may_differ, "the drafter was told something else than was drawn"
            return []
        behind = range(len(known), min(len(known) + most, len(whole)))
        return [self._guess(request_id, position, whole[position]) for position in behind]

    def learn(self, answer: Sequence[int], cache_salt: str) -> None:
        assert answer

    def end(self, request_id: str) -> None:
        del self._known[request_id], self._whole[request_id]

    def _guess(self, request_id: str, position: int, right: int) -> int:
        is_wrong = Random(f"{request_id}/{position}").random() < self._errors
        return (right + 1) % self._vocab_size if is_wrong else right

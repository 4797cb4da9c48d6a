"""Drafts for running requests: how many each gets in a step, what they are, and what became of them.

    planned   begin_step, then for each decode: propose ──> guesses of its next tokens
    settled   settled for each; observe the step

Tokens that steps in flight draw are not known yet, so a guess begins behind the last known token, and the drafts are
the part of it that lies behind those on their way. The drafter is told of a request and its tokens when it is asked for
guesses, so that steps without drafts cost nothing.

A drafter on the device guesses at the end of each step, behind what it drew, and the row keeps that for the next one:
there a draft is a number, and the plan says how many guesses are to be made for the next step.

A request with a grammar draws nothing while a step of its own is in flight. Its guesses are made when that step is
settled, so that its grammar, which makes the next mask in a thread, looks at them there as well.

On a GPU, the host edits the logits of some requests by position (penalties, biases, stop tokens that are shut), and
knows the position once all drafts before it are settled. Such a request sits out steps while a step of its own with
drafts is in flight, and has drafts only where they are worth a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..speculation.config import SpeculativeConfig, make_drafter
from ..speculation.drafter import DraftedRequest, Drafter
from ..speculation.length import DraftLengths
from ..speculation.stats import SpeculationCounter, SpeculationStats
from ..step import Chunk
from .request import Request

_TOKEN_TYPE = "i"
_TOKEN_BYTES = array(_TOKEN_TYPE).itemsize


def make_drafting(config: SpeculativeConfig | None, device: str) -> Drafting | None:
    """Return the drafting of an engine with these settings on a kind of device; None: tokens are not guessed ahead."""
    if config is None:
        return None
    return Drafting(
        make_drafter(config),
        config.num_speculative_tokens,
        edits_on_host=device == "cuda",
        on_device=config.guesses_on_device,
    )


class Drafts(NamedTuple):
    """The drafts of a request in a step."""

    num_drafts: int
    guesses: Sequence[int] = ()  # of the tokens from the last known one on; () where the row keeps them


NO_DRAFTS = Drafts(0)


class Drafting:
    """Asks one drafter for all running requests."""

    def __init__(
        self,
        drafter: Drafter,
        most: int,
        *,
        adapts: bool = True,
        edits_on_host: bool = False,
        on_device: bool = False,
    ) -> None:
        """`most`: drafts of a request in a step; where it `adapts`, as many as are worth their time.

        `edits_on_host`: where logits are edited by position, the host must know it when a step is planned. `on_device`:
        guesses are made there.
        """
        self.most = most
        self.drafter = drafter
        self._edits_on_host = edits_on_host
        self._on_device = on_device
        self._lengths = DraftLengths(most) if adapts else None
        self._counter = SpeculationCounter(most)
        self._num_told: dict[Request, int] = {}  # tokens that the drafter knows, of requests that it knows
        self._predicted: dict[Request, PredictedText] = {}  # of requests that the drafter knows
        self._num_accepted = 0  # in the step that is being settled

    @property
    def num_behind(self) -> int:
        """The number of tokens behind those of a step whose keys and values are written in it, too."""
        return self.most if self._on_device else 0

    def begin_step(self, num_decodes: int, num_prompt_tokens: int) -> bool:
        """Return whether any of so many decodes may have drafts in the next step, beside tokens of prompts."""
        if self._lengths is None:
            return num_decodes > 0
        return self._lengths.begin_step(num_decodes, num_prompt_tokens) > 0

    def must_settle(self, request: Request) -> bool:
        """Return whether a request's drafts must be settled before it is in a step again.

        One with a grammar waits for all of its tokens in any case.
        """
        return self._edits_on_host and not request.is_constrained and not request.message.sampling.is_plain

    def propose(self, request: Request, room: int, *, sits_out: bool = False) -> Drafts:
        """Return up to `room` drafts of a request, behind its tokens that are on their way.

        `sits_out`: with drafts it misses the next step.
        """
        num_drafts = min(room, self.most)
        if request.is_constrained:
            num_drafts = min(num_drafts, len(request.guesses))
        elif self._on_device:
            num_drafts = min(num_drafts, request.num_guesses)
        if self._lengths is not None:
            num_drafts = self._lengths.of(request.request_id, num_drafts, sits_out=sits_out)
        if not num_drafts:
            return NO_DRAFTS
        if request.is_constrained:
            return Drafts(num_drafts, request.guesses[:num_drafts])
        if self._on_device:
            return Drafts(num_drafts)
        self._tell(request)
        num_coming = request.num_computed - len(request.token_ids)
        guesses = self.drafter.propose(request.request_id, num_coming + num_drafts)
        return Drafts(len(guesses) - num_coming, guesses) if len(guesses) > num_coming else NO_DRAFTS

    def plan_guesses(self, chunks: Sequence[Chunk], requests: Sequence[Request]) -> int:
        """Return how many guesses the device makes behind each draw of a step, and note that its rows will have them.

        They are for the next step that each of these requests is in.
        """
        if not self._on_device:
            return 0
        drawn = [request for chunk, request in zip(chunks, requests, strict=True) if chunk.samples]
        asking = [request for request in drawn if request.may_go_on and not request.is_constrained]
        num_guesses = self.most if asking else 0
        if self._lengths is not None:
            num_guesses = self._lengths.made_ahead([request.request_id for request in asking])
        for request in drawn:
            request.num_guesses = num_guesses
        return num_guesses

    def guess_for_grammar(self, request: Request) -> tuple[int, Sequence[int]]:
        """Return how many drafts a request may get in its next step, and guesses of them, for its grammar to look at.

        It is called when all of its tokens are known; `propose` takes the drafts from what its grammar lets follow.
        """
        num_drafts = min(self.most, request.limit - 1 - len(request.token_ids))
        if self._lengths is not None:
            num_drafts = self._lengths.expected(request.request_id, num_drafts)
        if num_drafts <= 0:
            return 0, ()
        self._tell(request)
        return num_drafts, self.drafter.propose(request.request_id, num_drafts)

    def _tell(self, request: Request) -> None:
        """Tell the drafter all tokens of a request."""
        known = request.token_ids
        num_told = self._num_told.get(request)
        if num_told is None:
            message = request.message
            prediction = message.prediction_token_ids
            if prediction:
                self._predicted[request] = PredictedText(prediction)
            self.drafter.start(
                DraftedRequest(
                    request.request_id,
                    message.prompt_token_ids,
                    known[request.num_prompt :],
                    message.cache_salt,
                    prediction,
                )
            )
        elif num_told < len(known):
            self.drafter.extend(request.request_id, known[num_told:])
        self._num_told[request] = len(known)

    def settled(self, request: Request, chunk: Chunk, num_accepted: int) -> None:
        """Take in how many of a chunk's drafts were accepted, before the request has their tokens."""
        num_drafts = chunk.num_drafts
        request.settle_drafts(num_drafts, num_accepted, are_predicted=self._are_predicted(request, chunk))
        self._counter.settled(num_drafts, num_accepted)
        self._num_accepted += num_accepted
        if self._lengths is not None:
            self._lengths.settled(request.request_id, num_drafts, num_accepted)

    def _are_predicted(self, request: Request, chunk: Chunk) -> bool:
        """Return whether a chunk's guesses stand in the request's prediction, behind the same token of the answer."""
        text = self._predicted.get(request)
        if text is None:
            return False
        first = chunk.first_guess
        before = request.token_ids[max(request.num_prompt, first - 1) : first]
        return text.contains((*before, *chunk.drafts))

    def observe(
        self, num_requests: int, num_drafts: int, num_prompt_tokens: int, seconds: float, num_guesses: int = 0
    ) -> None:
        """Take in the time of a step, once its requests are settled: what decoded in it, and what else it read.

        The device made `num_guesses` of each request in it.
        """
        num_accepted, self._num_accepted = self._num_accepted, 0
        if self._lengths is None:
            return
        num_tokens = num_requests + num_drafts
        if num_prompt_tokens:
            self._lengths.observe_prompts(num_tokens + num_prompt_tokens, seconds)
        else:
            self._lengths.observe(num_tokens, seconds, num_drafts, num_accepted, num_guesses)

    def end(self, request: Request) -> None:
        """Forget a request that is over. Its answer is an example for others."""
        if self._lengths is not None:
            self._lengths.end(request.request_id)
        if request in self._num_told:
            self._tell(request)
            del self._num_told[request]
            self._predicted.pop(request, None)
            self.drafter.end(request.request_id)
        elif len(request.token_ids) > request.num_prompt:
            self.drafter.learn(request.token_ids[request.num_prompt :], request.message.cache_salt)

    def stats(self) -> SpeculationStats:
        return self._counter.stats()


class PredictedText:
    """The tokens of one prediction. Looking for a run of them takes a microsecond for some thousand tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._packed = array(_TOKEN_TYPE, token_ids).tobytes()

    def contains(self, token_ids: Iterable[int]) -> bool:
        """Return whether these tokens stand in the prediction, one right behind the other."""
        run = array(_TOKEN_TYPE, token_ids).tobytes()
        at = self._packed.find(run)
        while at > 0 and at % _TOKEN_BYTES:  # it begins within a token
            at = self._packed.find(run, at + 1)
        return at >= 0

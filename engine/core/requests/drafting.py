"""Drafts for running requests: how many each gets in a step, which tokens, and how many were accepted.

    planned   begin_step, then for each decode: propose ──> guesses of its next tokens
    settled   settled for each; observe the step

*Guesses* are tokens that may follow the last known token. While steps are in flight, the first guesses stand for the
tokens that these steps will draw; the rest are the *drafts* that the new step checks. The drafter hears of a request
and its tokens only when it is asked for guesses, so steps without drafts cost nothing.

A drafter on the device guesses at the end of each step, after the tokens drawn, and the row keeps the guesses for the
next step. In that case a plan has only the number of drafts, and the number of guesses to make for the next step.

A request with a grammar draws nothing while a step of its own is in flight. Its guesses are made when that step is
settled, so that the grammar's thread can check them together with its next mask.

On a GPU, the host edits the logits of some requests by position (penalties, biases, stop tokens before `min_tokens`),
and it knows the position only when all earlier drafts are settled. So such a request misses steps while one of its own
with drafts is in flight, and it gets drafts only if they are worth a missed step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..config import EngineCoreConfig
from ..speculation.config import make_drafter
from ..speculation.drafter import DraftedRequest, Drafter
from ..speculation.length import DraftLengths
from ..speculation.stats import SpeculationCounter, SpeculationStats
from ..step import Chunk
from .request import Request

# Tokens of requests of which a drafter is told in one step: it indexes 1000 in 0.4 ms, while nothing is planned.
MOST_STARTED_TOKENS = 1 << 16
# Tokens of each request, on average, that a draft model has not read:
MOST_UNREAD = 32  # while guesses are likely soon
FEW_UNREAD = 8  # before it makes guesses


def make_drafting(core: EngineCoreConfig, device: str) -> Drafting | None:
    """Return the drafting of an engine with these settings on this kind of device; None without speculation."""
    config = core.speculation
    if config is None:
        return None
    return Drafting(
        make_drafter(config),
        config.num_speculative_tokens,
        edits_on_host=device == "cuda",
        on_device=config.guesses_on_device,
        guesses_most=device == "cuda",
        most_read=core.max_num_batched_tokens if config.method == "draft_model" else None,
    )


class Drafts(NamedTuple):
    """The drafts of a request in a step."""

    num_drafts: int
    guesses: Sequence[int] = ()  # tokens after the last known one; empty if the row has them on the device


NO_DRAFTS = Drafts(0)


class Drafting:
    """Asks one drafter on behalf of all running requests."""

    def __init__(
        self,
        drafter: Drafter,
        most: int,
        *,
        adapts: bool = True,
        edits_on_host: bool = False,
        on_device: bool = False,
        guesses_most: bool = False,
        most_read: int | None = None,
    ) -> None:
        """Create the drafting of an engine, with at most `most` drafts for a request in a step.

        With `adapts`, a request gets only as many as are worth their time. `edits_on_host`: the host edits logits by
        position, so it must know the position when it plans a step. `on_device`: the device makes the guesses, and
        with `guesses_most` always `most` of them, or none. `most_read`: the drafter is a model that may read tokens
        later, so many of earlier steps in one; None: it reads all tokens of each step.
        """
        self.most = most
        self.drafter = drafter
        self._edits_on_host = edits_on_host
        self._on_device = on_device
        self._most_read = most_read
        self._lengths = None
        if adapts:
            self._lengths = DraftLengths(most, guesses_ahead=on_device, guesses_most=guesses_most)
        self._counter = SpeculationCounter(most)
        self._num_told: dict[Request, int] = {}  # how many tokens of each request the drafter knows
        self._num_started = 0  # tokens of requests of which it was told since the last `begin_step`
        self._predicted: dict[Request, PredictedText] = {}  # for requests that the drafter knows
        self._num_accepted = 0  # in the step that is being settled

    @property
    def num_behind(self) -> int:
        """The number of guesses whose keys and values a step may write behind its own tokens."""
        return self.most if self._on_device else 0

    def start(self, request: Request) -> None:
        """Note that a request has come. If its client expects an answer, drafts are tried soon."""
        if self._lengths is not None and request.message.prediction_token_ids:
            self._lengths.try_soon()

    def begin_step(self, num_decodes: int, num_prompt_tokens: int) -> bool:
        """Return whether any of `num_decodes` requests may have drafts in the next step, beside tokens of prompts."""
        self._num_started = 0
        if self._lengths is None:
            return num_decodes > 0
        return self._lengths.begin_step(num_decodes, num_prompt_tokens) > 0

    def must_settle(self, request: Request) -> bool:
        """Return whether the request's drafts must be settled before its next step.

        Requests with a grammar are not meant: they wait for all of their tokens in any case.
        """
        if not self._edits_on_host or request.is_constrained:
            return False
        return not request.message.sampling.is_plain or request.finish_rule.bans_stop_tokens(len(request.token_ids))

    def propose(self, request: Request, room: int, *, sits_out: bool = False) -> Drafts:
        """Return up to `room` drafts for a request, which follow its tokens in flight.

        `sits_out`: if it gets drafts now, it misses the next step.
        """
        num_drafts = min(room, self.most)
        if request.is_constrained:
            num_drafts = min(num_drafts, len(request.guesses))
        elif self._on_device:
            num_drafts = min(num_drafts, request.num_guesses)
        if self._lengths is not None:
            num_drafts = self._lengths.num_drafts_for(request.request_id, num_drafts, sits_out=sits_out)
        if not num_drafts:
            return NO_DRAFTS
        if request.is_constrained:
            return Drafts(num_drafts, request.guesses[:num_drafts])
        if self._on_device:
            return Drafts(num_drafts)
        if not self._may_tell(request):
            return NO_DRAFTS
        self._tell(request)
        num_coming = request.num_computed - len(request.token_ids)
        guesses = self.drafter.propose(request.request_id, num_coming + num_drafts)
        return Drafts(len(guesses) - num_coming, guesses) if len(guesses) > num_coming else NO_DRAFTS

    def plan_guesses(self, chunks: Sequence[Chunk], requests: Sequence[Request]) -> tuple[int, int | None]:
        """Return how many guesses the device makes after each token drawn in a step, and note them for its requests.

        Each request uses them as drafts in its next step. Also returns `StepPlan.reads_from`.
        """
        if not self._on_device:
            return 0, None
        drawn = [request for chunk, request in zip(chunks, requests, strict=True) if chunk.samples]
        asking = [request for request in drawn if request.may_go_on and not request.is_constrained]
        num_guesses, reads_from = self.most if asking else 0, None
        if self._lengths is not None:
            asking_ids = [request.request_id for request in asking]
            if self._most_read is not None:
                reads_from = self._plan_reads(self._lengths, chunks, requests, asking_ids, self._most_read)
            num_guesses = 0 if reads_from is not None else self._lengths.num_guesses_to_make(asking_ids)
        for request in drawn:
            request.num_guesses = num_guesses
        if num_guesses and self._most_read is not None:
            reads_from = _read_from(requests, FEW_UNREAD * len(requests)) or None
            for request in requests[: reads_from or 0]:
                request.num_guesses = 0  # they would be arbitrary
        return num_guesses, reads_from

    def planned(self, *, has_prompts: bool, reads_late: bool) -> None:
        """Note of the step just planned whether it reads prompts, and `StepPlan.reads_late`."""
        if self._lengths is not None:
            self._lengths.planned(has_prompts=has_prompts, reads_late=reads_late)

    def _plan_reads(
        self,
        lengths: DraftLengths,
        chunks: Sequence[Chunk],
        requests: Sequence[Request],
        asking_ids: Sequence[str],
        most: int,
    ) -> int | None:
        """Return the first chunk from which on a draft model reads in a step that makes no guesses; None: no chunk.

        It reads only if there will be guesses soon: so that the next steps can make them, or so many that a later one
        would have to wait for them. For a try it reads in one step alone, and the other requests get no guesses.
        """
        num_unread = num_drafts = 0
        for chunk, request in zip(chunks, requests, strict=True):
            num_drafts += chunk.num_drafts
            is_decode = chunk.num_tokens == 1 + chunk.num_drafts
            request.num_unread = request.num_unread + chunk.num_tokens if is_decode else 0
            num_unread += request.num_unread
        if num_drafts:  # their time is to be known
            return None
        is_late = lengths.are_worth_it and num_unread >= min(MOST_UNREAD * len(chunks), most)
        is_behind = num_unread > FEW_UNREAD * len(chunks) and lengths.should_read_first(asking_ids)
        return _read_from(requests, most) if is_late or is_behind else None

    def guess_for_grammar(self, request: Request) -> tuple[int, Sequence[int]]:
        """Return how many drafts a request may get in its next step, and guesses for its grammar to check.

        Called when all tokens of the request are known. `propose` then uses the guesses that the grammar allowed.
        """
        num_drafts = min(self.most, request.limit - 1 - len(request.token_ids))
        if self._lengths is not None:
            num_drafts = self._lengths.expected(request.request_id, num_drafts)
        if num_drafts <= 0:
            return 0, ()
        if not self._may_tell(request):
            return num_drafts, ()
        self._tell(request)
        return num_drafts, self.drafter.propose(request.request_id, num_drafts)

    def _may_tell(self, request: Request) -> bool:
        """Return whether the drafter may be told of the request in this step. It may always be told of one."""
        if request in self._num_told or not self._num_started:
            return True
        return self._num_started + _text_size(request) <= MOST_STARTED_TOKENS

    def _tell(self, request: Request) -> None:
        """Make the drafter know all tokens of the request."""
        known = request.token_ids
        num_told = self._num_told.get(request)
        if num_told is None:
            self._num_started += _text_size(request)
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
        """Take in how many of a chunk's drafts were accepted. Call it before the tokens are added to the request."""
        num_drafts = chunk.num_drafts
        request.settle_drafts(num_drafts, num_accepted, are_predicted=self._are_predicted(request, chunk))
        self._counter.settled(num_drafts, num_accepted)
        self._num_accepted += num_accepted
        if self._lengths is not None:
            self._lengths.settled(request.request_id, num_drafts, num_accepted)

    def _are_predicted(self, request: Request, chunk: Chunk) -> bool:
        """Return whether the request's prediction has the chunk's drafts in one piece, after the same token."""
        text = self._predicted.get(request)
        if text is None:
            return False
        first = chunk.first_guess
        before = request.token_ids[max(request.num_prompt, first - 1) : first]
        return text.contains((*before, *chunk.drafts))

    def observe(
        self,
        num_requests: int,
        num_drafts: int,
        num_prompt_tokens: int,
        seconds: float,
        num_guesses: int = 0,
        *,
        reads_late: bool = False,
    ) -> None:
        """Take in the time of a step, and what it computed, once its requests are settled.

        `num_requests` decoded in it with `num_drafts` drafts; the device made `num_guesses` for each of them, or a
        draft model read tokens of earlier steps.
        """
        num_accepted, self._num_accepted = self._num_accepted, 0
        if self._lengths is None:
            return
        num_tokens = num_requests + num_drafts
        if num_prompt_tokens:
            self._lengths.observe_prompts(num_tokens + num_prompt_tokens, seconds)
        else:
            self._lengths.observe(num_tokens, seconds, num_drafts, num_accepted, num_guesses, reads_late=reads_late)

    def end(self, request: Request) -> None:
        """Forget a request that has ended. The drafter may learn from its answer."""
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


def _text_size(request: Request) -> int:
    """Return the number of a request's tokens, its prediction included."""
    return len(request.token_ids) + len(request.message.prediction_token_ids)


def _read_from(requests: Sequence[Request], most: int) -> int:
    """Return the first request from which on a draft model has at most `most` tokens to read, and count them as read.

    It is never behind the last one.
    """
    first = len(requests)
    while first and (first == len(requests) or requests[first - 1].num_unread <= most):
        first -= 1
        most -= requests[first].num_unread
        requests[first].num_unread = 0
    return first


class PredictedText:
    """The tokens of one prediction, as characters of a text. A search takes 0.1 ms for 100 000 tokens."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._text = _as_text(token_ids)

    def contains(self, token_ids: Iterable[int]) -> bool:
        """Return whether the prediction has these tokens, one right after the other."""
        return _as_text(token_ids) in self._text


def _as_text(token_ids: Iterable[int]) -> str:
    """Return a text with one character for each token, so that `in` compares whole tokens."""
    return "".join(map(chr, token_ids))

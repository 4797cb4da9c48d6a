"""An engine with its fakes, the answers that it gave, and the invariants that hold after every step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from baton.engine.core.config import CacheGroupConfig, EngineCoreConfig
from baton.engine.core.connector import OfferOutcome
from baton.engine.core.engine import EngineCore
from baton.engine.core.grammar import GrammarSource
from baton.engine.core.messages import EngineOutput, EngineRequest, FinishReason
from baton.engine.core.requests.drafting import Drafting
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.core.speculation.drafter import DeviceDrafter
from baton.engine.offline.bench_drafts import InformedDrafter

from .core_checks import (
    check_checkpoints,
    check_in_flight,
    check_places,
    check_references,
    check_rows,
    check_unread,
)
from .core_connector import Arenas, FakeConnector, fetch_from_ticket
from .core_grammars import LateThreads
from .core_memory import expected_answer, kv_of, logprob_of
from .core_runner import FakeRunner
from .core_tiers import FakeTiers

BLOCK_SIZE = 4
VOCAB_SIZE = 50


@dataclass
class Answer:
    """All outputs of an engine for one request."""

    outputs: list[EngineOutput] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason

    @property
    def last(self) -> EngineOutput:
        return self.outputs[-1]


def config(
    *,
    groups: Sequence[tuple[int, int | None]] | None = None,
    states: Sequence[tuple[int, int]] = (),
    **changes: object,
) -> EngineCoreConfig:
    """Return the config of a small engine. Depth 1 unless given, so that a test can follow every step.

    `groups`: the arenas of several cache groups, as pairs of blocks and window, instead of `num_blocks`; `states`:
    those of the groups with states that follow, as pairs of slots and tokens between checkpoints.
    """
    if groups is not None:
        arenas = [CacheGroupConfig(num_blocks=count, window=window) for count, window in groups]
        arenas += [CacheGroupConfig(num_blocks=count, checkpoint_tokens=tokens) for count, tokens in states]
        changes["cache_groups"] = arenas
        changes["num_blocks"] = sum(arena.num_blocks for arena in arenas)
    sizes: dict[str, object] = {
        "num_blocks": 32,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 96,
        "vocab_size": VOCAB_SIZE,
        "depth": 1,
    }
    return EngineCoreConfig(**(sizes | changes))  # type: ignore[arg-type]


def request(request_id: str, prompt: int | list[int], **changes: object) -> EngineRequest:
    """Return a request with a prompt of the given length or tokens. Sampling parameters may be given by name."""
    own = {name: changes.pop(name) for name in list(changes) if name in EngineRequest.__struct_fields__}
    tokens = [(7 * position + 3) % VOCAB_SIZE for position in range(prompt)] if isinstance(prompt, int) else prompt
    sampling = own.pop("sampling", None) or SamplingParams(**changes)  # type: ignore[arg-type]
    return EngineRequest(request_id=request_id, prompt_token_ids=tokens, sampling=sampling, **own)  # type: ignore[arg-type]


def num_remembered(kind: type) -> int:
    """Count the objects of a class that are still referenced."""
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


class HandClock:
    """A clock that a test moves. Each look at it may take time, too: up to seven times `tick_s`."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s
        self.tick_s = 0.0
        self._num_looks = 0

    def __call__(self) -> float:
        self._num_looks += 1
        self.now_s += self.tick_s * (1 + self._num_looks**2 % 7)
        return self.now_s


class Harness:
    def __init__(
        self,
        engine_config: EngineCoreConfig,
        *,
        lazy: bool = True,
        min_restored_tokens: int | None = None,
        grammars: GrammarSource | None = None,
        offers_early: bool = False,
        clock: Callable[[], float] = time.monotonic,
        fetch: Callable[[bytes], Sequence[int]] = fetch_from_ticket,
        num_drafts: int = 0,
        draft_errors: float = 0.0,
        guesses_on_device: bool = False,
        most_read: int | None = None,
        edits_on_host: bool = False,
        adapts: bool = False,
    ) -> None:
        """Create an engine over fakes; with tiers if `min_restored_tokens` is given.

        `fetch`: returns the KV for another engine's ticket. `num_drafts`: the most drafts of a request in a step, of
        which a share of `draft_errors` is wrong. `guesses_on_device`: the runner makes them, at the end of a step; with
        `most_read`, by a draft model that may read so many tokens of earlier steps in one. `edits_on_host`: the runner
        edits logits by the positions in plans. `adapts`: requests get as many drafts as are worth their time.
        """
        self.config = engine_config
        self.runner = FakeRunner(engine_config, lazy=lazy)
        self.connector = FakeConnector(self.runner, fetch, offers_early=offers_early)
        self.unbegun: dict[tuple[str, int], int] = {}  # first tokens that the engine has not been told yet
        self.tiers = None
        if min_restored_tokens is not None:
            self.tiers = FakeTiers(Arenas(engine_config, self.runner), min_restored_tokens)
        self.runner.guess_errors = draft_errors
        self.runner.edits_on_host = edits_on_host
        self.drafter = InformedDrafter(self._whole, 1 - draft_errors, VOCAB_SIZE)
        drafting = None
        if guesses_on_device:
            drafting = Drafting(
                DeviceDrafter(),
                num_drafts,
                adapts=adapts,
                edits_on_host=edits_on_host,
                on_device=True,
                most_read=most_read,
            )
        elif num_drafts:
            drafting = Drafting(self.drafter, num_drafts, adapts=adapts, edits_on_host=edits_on_host)
        self.core = EngineCore(
            Scheduler(
                engine_config,
                self.connector,
                tiers=self.tiers,
                grammars=grammars,
                drafting=drafting,
                clock=clock,
            ),
            self.runner,
        )
        self.threads = LateThreads()  # unused without `think_late`
        self.asked: dict[tuple[str, int], EngineRequest] = {}
        self.answers: dict[tuple[str, int], Answer] = {}
        self._expected: dict[tuple[str, int], tuple[list[int], FinishReason]] = {}

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    def add(self, *requests: EngineRequest) -> None:
        for each in requests:
            self.asked[each.request_id, each.generation] = each
            self.core.add(each)

    def add_during_prefill(self, asked: EngineRequest, first_token: int) -> None:
        """Add a request whose blocks are still being sent; the engine learns its first token from `begin`."""
        key = asked.request_id, asked.generation
        self.asked[key] = msgspec.structs.replace(asked, output_token_ids=[first_token])
        self.unbegun[key] = first_token
        self.core.add(msgspec.structs.replace(asked, awaits_first_token=True))

    def think_late(self) -> None:
        """Open grammars and make masks only when a test says so, or when nothing else is left to do."""
        self.scheduler.constraints.openers = self.scheduler.constraints.maskers = self.threads

    def begin(self, request_id: str, generation: int = 0) -> None:
        self.core.begin(request_id, generation, self.unbegun.pop((request_id, generation)))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.core.step():
                key = output.request_id, output.generation
                answer = self.answers.setdefault(key, Answer())
                assert not answer.outputs or answer.finish_reason is None, "an output after the last one"
                answer.outputs.append(output)
                self.check_answer(key)
            self.check()

    def run(self) -> None:
        """Step until nothing is left to do without events from outside."""
        for _ in range(10_000):
            if not self.core.has_work():
                return
            while self.threads.waiting:
                self.threads.work()
            self.step()
        raise AssertionError("the engine goes round in circles")

    def answer(self, request_id: str, generation: int = 0) -> Answer:
        return self.answers[request_id, generation]

    def is_answered(self, request_id: str, generation: int = 0) -> bool:
        answer = self.answers.get((request_id, generation))
        return answer is not None and answer.finish_reason is not None

    def only_pull(self) -> int:
        (transfer_id,) = self.connector.pulls
        return transfer_id

    def only_offer(self) -> int:
        (transfer_id,) = self.connector.offers
        return transfer_id

    def finish_transfers(self) -> None:
        """Finish every transfer and copy that is still open."""
        for key in list(self.unbegun):
            self.begin(*key)
        for transfer_id, pull in list(self.connector.pulls.items()):
            if not pull.failed and not pull.cancelled:
                self.connector.complete(transfer_id)
                continue
            if not pull.failed:
                self.connector.fail(transfer_id)
            self.connector.release(transfer_id)
        for transfer_id in list(self.connector.offers):
            self.connector.end_offer(transfer_id, OfferOutcome.EXPIRED)
        if self.tiers is not None:
            self.tiers.finish_all()

    def run_to_the_end(self) -> None:
        self.step()  # takes in the last events
        while self.core.has_work() or self.unbegun or self._any_transfer() or self._any_copies():
            self.run()
            self.finish_transfers()
            self.step()
        self.check_all_given_back()

    def _any_transfer(self) -> bool:
        return bool(self.connector.pulls or self.connector.offers)

    def _any_copies(self) -> bool:
        return self.tiers is not None and bool(self.tiers.stores or self.tiers.restores)

    # ---- rules

    def check(self) -> None:
        for group in self.scheduler.groups:
            group.pool.check()
        self.connector.check_offers()
        for offer in self.connector.offers.values():
            asked = self.asked[offer.request_id, offer.generation]
            self.connector.check_content(offer, [*asked.prompt_token_ids, *asked.output_token_ids])
        if self.tiers is not None:
            self.tiers.check_lent()
        for number in range(len(self.scheduler.groups)):
            check_references(self.scheduler, number)
        check_in_flight(self.scheduler, self.runner)
        check_checkpoints(self.scheduler, self.runner)
        check_rows(self.scheduler)
        check_places(self.scheduler)
        check_unread(self.scheduler)

    def expected(self, key: tuple[str, int]) -> tuple[list[int], FinishReason]:
        """Return the answer that a request gets when it runs alone."""
        if key not in self._expected:
            self._expected[key] = expected_answer(self.asked[key], self.config)
        return self._expected[key]

    def _whole(self, request_id: str, _: Sequence[int]) -> list[int]:
        """Return the prompt and the whole answer of the live request of this id."""
        key = request_id, self.scheduler.requests[request_id].generation
        asked, (answer, _) = self.asked[key], self.expected(key)
        return [*asked.prompt_token_ids, *asked.output_token_ids, *answer]

    def check_answer(self, key: tuple[str, int]) -> None:
        """Check that the tokens so far are those of the request alone, and that it ended by itself or was cut off."""
        asked, answer = self.asked[key], self.answers[key]
        early = [output for output in answer.outputs if output.kv_source and output.finish_reason is None]
        assert early == answer.outputs[: len(early)], "an early offer behind a token"
        assert len({output.kv_source.ticket for output in early}) == len(early)
        if answer.outputs[0].error is not None or not answer.token_ids:
            return
        tokens, reason = self.expected(key)
        newest = answer.outputs[-1]
        assert answer.token_ids == tokens[: len(answer.token_ids)]
        self._check_logprobs(asked, answer.token_ids, newest)
        if answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.HANDOFF):
            assert (answer.token_ids, answer.finish_reason) == (tokens, reason)
        computed_here = not asked.output_token_ids and asked.kv_source is None
        wants_prompt = asked.sampling.prompt_logprobs is not None and computed_here
        first = next(output for output in answer.outputs if output.token_ids)
        if wants_prompt:
            prompt = asked.prompt_token_ids
            expected = [logprob_of(kv, token) for kv, token in zip(kv_of(prompt), prompt[1:], strict=False)]
            assert first.prompt_logprobs is not None
            assert list(first.prompt_logprobs) == [(tuple(ids), tuple(values), rank) for ids, values, rank in expected]

    @staticmethod
    def _check_logprobs(asked: EngineRequest, answer: Sequence[int], newest: EngineOutput) -> None:
        """Check that the log probabilities of the newest tokens are those of the draws that gave these tokens."""
        if newest.logprobs is None:
            return
        tokens = [*asked.prompt_token_ids, *asked.output_token_ids, *answer]
        kv, first = kv_of(tokens), len(tokens) - len(newest.token_ids)
        expected = [logprob_of(kv[place - 1], tokens[place]) for place in range(first, len(tokens))]
        assert list(newest.logprobs) == [(tuple(ids), tuple(values), rank) for ids, values, rank in expected]

    def check_all_given_back(self) -> None:
        stats = self.core.stats()
        assert stats.num_blocks_free == stats.num_blocks == self.config.num_blocks
        assert stats.num_requests_running == stats.num_requests_waiting == stats.num_requests_waiting_for_kv == 0
        assert stats.num_blocks_held == stats.num_blocks_quarantined == 0
        assert self.scheduler.rows.num_free == self.config.max_num_seqs
        assert not self.scheduler.requests
        assert not self.drafter.num_requests
        for key in self.asked:
            assert key in self.answers, f"{key} was never answered"
            assert self.answers[key].finish_reason is not None, f"{key} was not answered to the end"

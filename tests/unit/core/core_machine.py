"""A Hypothesis machine for an engine: any event in any order. `core_harness.check` has the invariants."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from baton.engine.core.connector import OfferOutcome
from baton.engine.core.messages import EngineRequest, ErrorKind, FinishReason, KVSource
from baton.engine.core.requests.request import RequestStatus
from baton.engine.core.sampling import SamplingParams

from .core_connector import ticket_for
from .core_harness import VOCAB_SIZE, HandClock, Harness
from .core_prompts import prompts, samplings

TOKENS = st.integers(0, VOCAB_SIZE - 1)


class EngineMachine(RuleBasedStateMachine):
    """Requests of every kind, and transfers in both directions, in the engine that a subclass starts: `self.engine`."""

    engine: Harness

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.clock = HandClock()
        self.kept_from_thinking: set[tuple[str, int]] = set()  # requests whose grammars may be too slow

    def new_id(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def live_ids(self) -> list[str]:
        return list(self.engine.scheduler.requests)

    @rule(
        prompt=prompts(),
        sampling=samplings(),
        output=st.one_of(st.lists(TOKENS, max_size=2), st.lists(TOKENS, max_size=26)),
        salt=st.sampled_from(["", "", "a"]),
        priority=st.integers(-1, 1),
        seed=st.integers(0, 3),
        keep_kv=st.sampled_from([False, False, True]),
        timeout_s=st.sampled_from([0.0, 0.0, 0.0, 5.0]),
    )
    def add(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        output: list[int],
        salt: str,
        priority: int,
        seed: int,
        keep_kv: bool,
        timeout_s: float,
    ) -> None:
        self.engine.add(
            EngineRequest(
                request_id=self.new_id(),
                prompt_token_ids=prompt,
                output_token_ids=output,
                sampling=sampling,
                cache_salt=salt,
                priority=priority,
                seed=seed,
                keep_kv=keep_kv,
                timeout_s=timeout_s,
            )
        )

    @rule(prompt=prompts(), sampling=samplings(), count=st.integers(2, 4), keep_kv=st.booleans())
    def add_several_choices(self, prompt: list[int], sampling: SamplingParams, count: int, keep_kv: bool) -> None:
        """Add the requests that a gateway makes of one with `n` above 1."""
        choices = [
            EngineRequest(
                request_id=self.new_id(), prompt_token_ids=prompt, sampling=sampling, seed=seed, keep_kv=keep_kv
            )
            for seed in range(count)
        ]
        self.engine.add(*choices)

    @rule(
        prompt=prompts(),
        sampling=samplings(),
        missing=st.integers(1, 3),
        output=st.one_of(TOKENS.map(lambda token: [token]), st.lists(TOKENS, min_size=1, max_size=26)),
        unit=st.sampled_from([1, 1, 4, 8]),
    )
    def add_after_a_handoff(
        self, prompt: list[int], sampling: SamplingParams, missing: int, output: list[int], unit: int
    ) -> None:
        """Continue an answer whose KV another engine has, all of it or without the last few tokens."""
        tokens = [*prompt, *output]
        received = tokens[: max(1, (len(tokens) - missing) // unit * unit)]
        self.engine.add(
            EngineRequest(
                request_id=self.new_id(),
                prompt_token_ids=prompt,
                output_token_ids=output,
                sampling=sampling,
                kv_source=KVSource(ticket_for(received), len(received)),
            )
        )

    @rule(prompt=prompts(), sampling=samplings(can_have_grammar=False), first=TOKENS)
    def add_during_prefill(self, prompt: list[int], sampling: SamplingParams, first: int) -> None:
        source = KVSource(ticket_for(prompt), len(prompt))
        asked = EngineRequest(request_id=self.new_id(), prompt_token_ids=prompt, sampling=sampling, kv_source=source)
        self.engine.add_during_prefill(asked, first)

    @precondition(lambda self: self.engine.unbegun)
    @rule(data=st.data())
    def prefill_ends(self, data: st.DataObject) -> None:
        self.engine.begin(*data.draw(st.sampled_from(sorted(self.engine.unbegun))))

    @precondition(lambda self: self.live_ids())
    @rule(data=st.data())
    def resubmit(self, data: st.DataObject) -> None:
        """Submit the same request: a newer generation takes its place."""
        request_id = data.draw(st.sampled_from(self.live_ids()))
        live = self.engine.scheduler.requests[request_id]
        old = live.message
        self.engine.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=old.prompt_token_ids,
                sampling=old.sampling,
                generation=live.generation + 1,
                keep_kv=old.keep_kv,
            )
        )

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        self.engine.step(count)

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = f"r{data.draw(st.integers(1, self.count))}"
        self.engine.core.abort(request_id)
        for offer in self.engine.connector.offers.values():
            assert offer.request_id != request_id or offer.withdrawn
        self.engine.check()

    @precondition(lambda self: self.count)
    @rule(data=st.data(), newest=st.integers(0, 2))
    def abort_an_attempt(self, data: st.DataObject, newest: int) -> None:
        """Abort an attempt and the older ones; newer ones continue."""
        request_id = f"r{data.draw(st.integers(1, self.count))}"
        live, offers = self.engine.scheduler.requests, self.engine.connector.offers
        later = request_id in live and live[request_id].generation > newest
        withdrawn = {transfer: offer.withdrawn for transfer, offer in offers.items()}
        self.engine.core.abort(request_id, newest)
        assert (request_id in live) == later
        for transfer, offer in offers.items():
            meant = offer.request_id == request_id and offer.generation <= newest
            assert offer.withdrawn == (withdrawn[transfer] or meant)
        self.engine.check()

    @precondition(lambda self: self.engine.connector.pulls)
    @rule(data=st.data(), way=st.sampled_from(["complete", "complete", "fail", "scribble", "release"]))
    def move_a_transfer(self, data: st.DataObject, way: str) -> None:
        connector = self.engine.connector
        transfer_id = data.draw(st.sampled_from(sorted(connector.pulls)))
        pull = connector.pulls[transfer_id]
        if way == "scribble":
            connector.scribble(transfer_id)
        elif way == "complete" and not pull.failed and not pull.cancelled:
            connector.complete(transfer_id)
        elif way == "fail" and not pull.failed:
            connector.fail(transfer_id)
        elif way == "release" and pull.failed:
            connector.release(transfer_id)

    @precondition(lambda self: self.engine.threads.waiting)
    @rule(data=st.data())
    def think(self, data: st.DataObject) -> None:
        threads = self.engine.threads
        threads.work(data.draw(st.integers(0, len(threads.waiting) - 1)))

    @rule(seconds=st.sampled_from([3.0, 11.0]))
    def wait(self, seconds: float) -> None:
        """Let more time pass than some requests may last, or than a tier or a grammar may take."""
        self.clock.now_s += seconds
        for request in self.engine.scheduler.requests.values():
            if request.message.sampling.structured_outputs is not None:
                self.kept_from_thinking.add((request.request_id, request.generation))

    @precondition(lambda self: self.engine.tiers is not None)
    @rule(
        data=st.data(),
        way=st.sampled_from(["store", "store", "lose", "restore", "restore", "corrupt", "scribble", "forget"]),
    )
    def move_between_tiers(self, data: st.DataObject, way: str) -> None:
        tiers = self.engine.tiers
        copies = tiers.stores if way in ("store", "lose") else tiers.restores
        if way == "forget":
            for name in list(tiers.kept)[:: data.draw(st.integers(1, 3))]:
                tiers.lose(name)
        elif copies:
            copy_id = data.draw(st.sampled_from(sorted(copies)))
            if way == "scribble":
                tiers.scribble(copy_id)
            elif way in ("store", "lose"):
                tiers.finish_store(copy_id, kept=way == "store")
            else:
                tiers.finish_restore(copy_id, data.draw(st.integers(0, 2)) if way == "corrupt" else None)

    @precondition(lambda self: self.engine.connector.offers)
    @rule(data=st.data(), outcome=st.sampled_from(OfferOutcome))
    def end_an_offer(self, data: st.DataObject, outcome: OfferOutcome) -> None:
        connector = self.engine.connector
        connector.end_offer(data.draw(st.sampled_from(sorted(connector.offers))), outcome)

    @rule()
    def let_it_run(self) -> None:
        """Step, and check that no request is left waiting that needs nothing from outside."""
        self.engine.run()
        self.engine.step()  # takes in the last events
        self.engine.run()
        tiers = self.engine.tiers
        waits_for_copies = tiers is not None and (tiers.stores or tiers.restores)
        outside = self.engine.connector.offers or self.engine.unbegun
        if not outside and not self.engine.connector.pulls and not waits_for_copies:
            assert not self.live_ids()
        waits_for_slots = tiers is not None and tiers.stores and self.engine.scheduler.memory.has_states
        if not self.engine.scheduler.transfers.has_withdrawn_offers and not waits_for_slots:
            # Without these, a running request may wait until a reader lets go of blocks, or its state is stored.
            statuses = {request.status for request in self.engine.scheduler.requests.values()}
            assert RequestStatus.RUNNING not in statuses

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run_to_the_end()
        for key, answer in self.engine.answers.items():
            if answer.finish_reason is FinishReason.ERROR:
                assert answer.last.error is not None
                allowed = {ErrorKind.TOO_LONG, ErrorKind.KV_LOST, ErrorKind.TIMED_OUT}
                if key in self.kept_from_thinking:
                    allowed |= {ErrorKind.OVERLOADED, ErrorKind.INVALID}
                assert answer.last.error.kind in allowed

"""The hybrid demo model recalls values, whatever has happened to its recurrent states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest

from baton.engine.config import EngineConfig
from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.kv.cache_groups import StateGroup
from baton.engine.core.layout import CHECKPOINT_TOKENS
from baton.engine.core.messages import EngineRequest
from baton.engine.core.prefix import BlockHash
from baton.engine.core.requests.drafting import Drafting
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.speculation.config import make_drafter
from baton.engine.startup import build
from baton.engine.startup.build import Engine, build_engine

from ...helpers.recall import HYBRID, Questions
from .copy_connector import GrowingRoom, Room
from .handing_off import hand_off, run

pytestmark = pytest.mark.slow

RIGHT = 0.95  # of the answers, with or without disturbance


def engine_of(room: Room | None = None, **args: object) -> Engine:
    sizes = {"max_model_len": 800, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    config = EngineConfig.from_args({"model": str(HYBRID), "dtype": "float32", **sizes, **args})
    return build_engine(config, None if room is None else room.connect)


@pytest.fixture(scope="module")
def questions() -> Questions:
    return Questions.of(HYBRID, [40, 300, 700], 8)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = engine_of()
    yield engine
    engine.close()


def answers(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    steps = run(engine.core, requests)
    return {name: [token for step in steps[name] for token in step.token_ids] for name in steps}


def handed_over(prefill: Engine, decode: Engine, questions: Questions) -> dict[str, list[int]]:
    """Hand over a few requests at a time: the prefill engine keeps its offers until it has read a round's prompts."""
    tokens: dict[str, list[int]] = {}
    for first in range(0, len(questions.requests), 6):
        some = questions.requests[first : first + 6]
        drawn = hand_off(prefill.core, decode.core, some)
        tokens |= {request.request_id: each for request, each in zip(some, drawn, strict=True)}
    return tokens


def test_undisturbed_and_again_out_of_the_cache(engine: Engine, questions: Questions) -> None:
    assert questions.share_right(answers(engine, list(questions.requests))) >= RIGHT
    cached = list(reversed(questions.requests))[:10]  # the last ones are still there
    again = answers(engine, cached)
    assert all(again[each.request_id] == questions.answers[each.request_id] for each in cached)
    assert engine.core.stats().prefix_cache_hits > 0


@pytest.mark.parametrize("make_room", [Room, GrowingRoom], ids=["at the end", "early"])
def test_through_prefill_and_decode(make_room: type[Room], questions: Questions) -> None:
    room = make_room()
    assert questions.share_right(handed_over(engine_of(room), engine_of(room), questions)) >= RIGHT


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_with_drafts_through_prefill_and_decode(
    method: str, engine: Engine, questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also, long answers are those of an engine without drafts, however many drafts it accepts."""

    def make(core: EngineCoreConfig, device: str) -> Drafting | None:
        config = core.speculation
        return None if config is None else Drafting(make_drafter(config), config.num_speculative_tokens, adapts=False)

    monkeypatch.setattr(build, "make_drafting", make)
    room = Room()
    decode = engine_of(room, speculative_config={"method": method, "num_speculative_tokens": 5})
    prefill = engine_of(room)
    assert questions.share_right(handed_over(prefill, decode, questions)) >= RIGHT
    writing = [
        msgspec.structs.replace(
            each, sampling=SamplingParams(temperature=0.3 * (number % 3), max_tokens=90, ignore_eos=True), seed=number
        )
        for number, each in enumerate(questions.requests[:6])
    ]
    undisturbed = answers(engine, writing)
    assert hand_off(prefill.core, decode.core, writing) == [undisturbed[each.request_id] for each in writing]
    speculation = decode.core.stats().speculation
    assert speculation is not None
    assert speculation.num_accepted_tokens > 10


def test_a_state_that_was_not_handed_over_shows(questions: Questions, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the shares above test states, and not only KV blocks."""
    room = Room()
    prefill, decode = engine_of(room), engine_of(room)
    monkeypatch.setattr(room.peers[1], "skips", lambda region, block: block >= region.first_blocks[1])
    assert questions.share_right(handed_over(prefill, decode, questions)) < 0.5


def test_a_stale_checkpoint_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint lies within the question, whose key the state must know; the one before it knows nothing of it."""
    length = 2 * CHECKPOINT_TOKENS + 2
    whole = Questions.of(HYBRID, [length + 40], 8)
    requests = [
        msgspec.structs.replace(each, prompt_token_ids=each.prompt_token_ids[-length:]) for each in whole.requests
    ]
    engine = engine_of(max_model_len=1100, max_num_seqs=12)
    given: dict[str, list[int]] = {}
    for each in requests:  # one by one, so that a chunk ends at the checkpoint
        given |= answers(engine, [each])
    right = {name: answer for name, answer in whole.answers.items() if given[name] == answer}
    questions = Questions([each for each in requests if each.request_id in right], right)
    assert len(right) > len(requests) / 2, "the first lines were left out, and with them few of the pairs asked for"
    hits = engine.core.stats().prefix_cache_hits
    assert questions.share_right(answers(engine, questions.requests)) == 1
    assert engine.core.stats().prefix_cache_hits - hits == len(right) * 2 * CHECKPOINT_TOKENS
    find = StateGroup.find

    def older(self: StateGroup, hashes: Sequence[BlockHash]) -> Sequence[int]:
        found = find(self, hashes)
        return [found[max(0, entry - 1)] for entry in range(len(found))]

    monkeypatch.setattr(StateGroup, "find", older)
    assert questions.share_right(answers(engine, questions.requests)) < 0.5


def test_requests_that_were_preempted_recall_as_well(questions: Questions) -> None:
    """Requests that write long answers need blocks, and preempt those behind them."""
    crowded = engine_of(num_gpu_blocks_override=70)
    writing = SamplingParams(temperature=1.0, max_tokens=300, ignore_eos=True)
    writers = [
        EngineRequest(request_id=f"writer {n}", prompt_token_ids=[5 + n] * 20, sampling=writing, seed=n)
        for n in range(4)
    ]
    tokens = answers(crowded, [*writers, *questions.requests])
    assert crowded.core.stats().num_preemptions > 0
    assert questions.share_right(tokens) >= RIGHT


def test_migrated_in_mid_answer(engine: Engine, questions: Questions) -> None:
    """The second token of an answer comes from an engine that has recomputed everything before it."""
    other = engine_of()
    begun = answers(
        other,
        [
            msgspec.structs.replace(each, sampling=SamplingParams(temperature=0.0, max_tokens=1))
            for each in questions.requests
        ],
    )
    moved = [msgspec.structs.replace(each, output_token_ids=begun[each.request_id]) for each in questions.requests]
    rest = answers(engine, moved)
    assert questions.share_right({name: begun[name] + rest[name] for name in begun}) >= RIGHT

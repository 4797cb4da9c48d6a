"""Prompts and sampling parameters that Hypothesis draws for engines."""

from __future__ import annotations

from hypothesis import strategies as st

from baton.engine.core.messages import EngineRequest
from baton.engine.core.sampling import SamplingParams, StructuredOutputsParams

from .core_harness import VOCAB_SIZE

# Few stems, so that prompts share prefixes of any length.
STEMS = [[(stem + 3) * (position + 1) % VOCAB_SIZE for position in range(60)] for stem in range(3)]


@st.composite
def prompts(draw: st.DrawFn, max_length: int = 40) -> list[int]:
    stem = draw(st.sampled_from(STEMS))[: draw(st.integers(1, max_length))]
    return stem + draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3))


@st.composite
def samplings(draw: st.DrawFn, *, can_have_grammar: bool = True) -> SamplingParams:
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 30)))
    has_grammar = can_have_grammar and draw(st.sampled_from([False, False, True]))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=0 if has_grammar else draw(st.integers(0, min(4, max_tokens or 4))),
        ignore_eos=not has_grammar and draw(st.booleans()),
        structured_outputs=StructuredOutputsParams(regex=".*") if has_grammar else None,
        # Not 0, which the fake draws before `min_tokens`, too: from a device that would say that nothing is left.
        stop_token_ids=draw(st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=4)),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
    )


def crowd() -> list[EngineRequest]:
    """More requests than few blocks hold, of two priorities, whose prompts share beginnings."""
    return [
        EngineRequest(
            request_id=f"r{index}",
            prompt_token_ids=STEMS[index % 3][: 5 + index],
            sampling=SamplingParams(max_tokens=20 + index, prompt_logprobs=0 if index % 4 == 0 else None),
            priority=index % 2,
            seed=index,
        )
        for index in range(16)
    ]

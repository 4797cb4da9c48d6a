"""Decode steps that are made again by recorded calls give what the model's Python gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton.engine import LLM, SamplingParams
from baton.engine.layers import mlp
from baton.engine.worker import decode_tapes
from baton.engine.worker.decode_tapes import DecodeTape, DecodeTapes
from baton.engine.worker.inputs import StepInputs
from baton.kernels.linear import pack

PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 200 + 3 for j in range(4 + 9 * i)]} for i in range(6)]
PARAMS = [
    SamplingParams(max_tokens=4 + 5 * i, temperature=0.0 if i % 2 else 1.0, seed=i, ignore_eos=True) for i in range(6)
]


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each step had that a tape served."""
    made: list[int] = []
    inner = DecodeTape.forward

    def counted(tape: DecodeTape, inputs: StepInputs) -> Tensor:
        made.append(len(inputs.rows))
        return inner(tape, inputs)

    monkeypatch.setattr(DecodeTape, "forward", counted)
    return made


def test_batches_that_shrink_and_grow_give_the_tokens_of_steps_without_tapes(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, served: list[int]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(DecodeTapes, "find", lambda *args: None)
        expected = tokens(make_llm(dtype="bfloat16"))
    llm = make_llm(dtype="bfloat16")
    served.clear()
    monkeypatch.setattr(decode_tapes, "record", None)  # a request records nothing
    assert tokens(llm) == expected
    assert tokens(llm) == expected
    if pack(torch.zeros(32, 32, dtype=torch.bfloat16)).in_panels:
        assert set(served) == {1, 2, 3, 4, 5, 6}, "sizes that are recorded, and some that are filled up"


def test_sizes_that_cannot_be_recorded_go_on_without_tapes(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, served: list[int]
) -> None:
    """As those of more sequences than an MLP takes at once, whose slices are put together by torch."""
    expected = tokens(make_llm(dtype="bfloat16"))
    served.clear()
    monkeypatch.setattr(mlp, "CPU_SLICE", 3)
    assert tokens(make_llm(dtype="bfloat16")) == expected
    if pack(torch.zeros(32, 32, dtype=torch.bfloat16)).in_panels:
        assert set(served) == {1, 2}


def test_a_model_that_needs_torch_goes_on_without_tapes(make_llm: Callable[..., LLM], served: list[int]) -> None:
    """In float32, products are torch's."""
    llm = make_llm(dtype="float32")
    assert all(tokens(llm))
    assert not served

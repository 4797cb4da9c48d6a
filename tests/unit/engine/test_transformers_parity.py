"""The engine, with chunks and batches, against `transformers` on whole sequences: float32, random weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import LLM, Logprob, SamplingParams

from ...helpers.checkpoints import make_model, write_checkpoint
from .transformers_reference import PROMPTS, expected_logprobs

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def yardstick(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def assert_agrees(found: dict[int, Logprob], expected: torch.Tensor, token: int, num_top: int) -> None:
    """Check an entry `found` of one position against the log probabilities `expected` [vocab] there."""
    ordered = expected.sort(descending=True)
    assert next(iter(found)) == token
    assert found[token].rank == 1 + int((expected > expected[token]).sum())
    assert set(found) == {token, *ordered.indices[:num_top].tolist()}
    for other, logprob in found.items():
        assert logprob.logprob == pytest.approx(expected[other].item(), abs=TOLERANCE)
        assert logprob.rank == 1 + int((expected > expected[other]).sum())


@pytest.mark.parametrize("chunk", [8, 256])
def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    make_llm: Callable[..., LLM], yardstick: Any, chunk: int
) -> None:
    llm = make_llm(max_num_batched_tokens=chunk, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=4)
    for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        (output,) = result.outputs
        expected = expected_logprobs(yardstick, prompt + output.token_ids)[len(prompt) - 1 :]
        assert output.token_ids == expected[:-1].argmax(-1).tolist()
        assert output.logprobs is not None
        for i, token in enumerate(output.token_ids):
            assert_agrees(output.logprobs[i], expected[i], token, num_top=4)
        total = sum(expected[i, token].item() for i, token in enumerate(output.token_ids))
        assert output.cumulative_logprob == pytest.approx(total, abs=20 * TOLERANCE)


def test_logprobs_of_drawn_tokens_are_those_before_temperature_and_penalties(llm: LLM, yardstick: Any) -> None:
    params = SamplingParams(
        temperature=1.7, seed=3, repetition_penalty=1.5, logit_bias={8: 4.0}, max_tokens=12, logprobs=2, ignore_eos=True
    )
    (output,) = llm.generate(PROMPTS[3], params, use_tqdm=False)[0].outputs
    expected = expected_logprobs(yardstick, PROMPTS[3] + output.token_ids)[len(PROMPTS[3]) - 1 :]
    assert output.logprobs is not None
    for i, token in enumerate(output.token_ids):
        assert_agrees(output.logprobs[i], expected[i], token, num_top=2)


@pytest.mark.parametrize("args", [{}, {"max_num_batched_tokens": 8}, {"async_scheduling": True}])
def test_prompt_logprobs_are_those_of_transformers(make_llm: Callable[..., LLM], yardstick: Any, args: Any) -> None:
    """Also where an earlier request left the prompt in the prefix cache: what is cached has no logits."""
    llm = make_llm(**args)
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3)
    for _ in range(2):
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
            assert result.prompt_logprobs is not None
            assert len(result.prompt_logprobs) == len(prompt)
            assert result.prompt_logprobs[0] is None
            expected = expected_logprobs(yardstick, prompt)
            for i, entry in enumerate(result.prompt_logprobs[1:]):
                assert entry is not None
                assert_agrees(entry, expected[i], prompt[i + 1], num_top=3)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_draws_and_logprobs_see_capped_logits(kind: str, tmp_path: Path) -> None:
    """The cap is so low that `min_p` keeps tokens which it would drop without the cap."""
    cap, min_p = 2.5, 0.1
    keys = {"final_logit_softcapping": cap}
    llm = LLM(str(write_checkpoint(tmp_path, kind, **keys)), skip_tokenizer_init=True, max_num_seqs=8)
    reference = make_model(kind, **keys)
    params = SamplingParams(min_p=min_p, seed=5, max_tokens=60, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (result,) = llm.generate([PROMPTS[3]], params, use_tqdm=False)
    (output,) = result.outputs
    tokens = PROMPTS[3] + output.token_ids
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens])).logits[0, len(PROMPTS[3]) - 1 : -1].double()
    expected, drawn = logits.log_softmax(-1), torch.tensor(output.token_ids)[:, None]
    assert output.logprobs is not None
    for i, token in enumerate(output.token_ids):
        assert_agrees(output.logprobs[i], expected[i], token, num_top=2)
    behind = (logits.gather(1, drawn) - logits.max(-1, keepdim=True).values).squeeze(1)
    assert (behind >= math.log(min_p) - TOLERANCE).all()
    uncapped = cap * torch.atanh(logits / cap)
    assert ((uncapped.gather(1, drawn) - uncapped.max(-1, keepdim=True).values) < math.log(min_p)).any()

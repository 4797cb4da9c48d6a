"""On a GPU in bfloat16, every architecture is as near to float32 results as `transformers` in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.layers.decoder import CausalLM
from baton.engine.models import load_config, load_model

from ...helpers.checkpoints import ARCHITECTURES, MISROUTED, NEAR_TIE, make_model, write_checkpoint
from ...helpers.paged import PagedRun, chunked_logprobs, random_tokens, reference_logprobs
from ...helpers.tiny_shapes import wide_shape

pytestmark = pytest.mark.gpu


@pytest.fixture(params=ARCHITECTURES)
def models(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[CausalLM, Any, Any]:
    """Return (our model, that of `transformers`, the latter in float32) with equal weights on the GPU."""
    architecture = request.param
    keys = wide_shape(architecture)
    folder = write_checkpoint(tmp_path / "model", architecture, dtype="bfloat16", **keys)
    theirs = make_model(architecture, dtype="bfloat16", **keys).cuda()
    exact = make_model(architecture, **keys).cuda()
    exact.load_state_dict({name: tensor.float() for name, tensor in theirs.state_dict().items()})
    return load_model(load_config(folder), device="cuda"), theirs, exact


def test_logprobs_in_chunks_and_token_by_token_err_no_more_than_those_of_transformers(
    models: tuple[CausalLM, Any, Any],
) -> None:
    ours, theirs, exact = models
    tokens = random_tokens(250)  # so long that latents are expanded
    truth = reference_logprobs(exact, tokens)
    unavoidable = reference_logprobs(theirs, tokens) - truth
    for chunk in (250, 37, 1):
        error = chunked_logprobs(ours, tokens, chunk) - truth
        assert not error.isnan().any()
        assert error.square().mean() < 1.5**2 * unavoidable.square().mean()


def test_greedy_tokens_of_ragged_prompts_run_together_are_the_best_or_nearly_tied_with_it(
    models: tuple[CausalLM, Any, Any],
) -> None:
    ours, _, exact = models
    prompts = [random_tokens(length, seed=length) for length in (1, 17, 50, 16)]
    run = PagedRun(ours, len(prompts), 64)
    outputs = [list(prompt) for prompt in prompts]
    pending = [list(prompt) for prompt in prompts]
    for _ in range(12):
        for sequence, logprobs in enumerate(run.step(list(enumerate(pending)))):
            pending[sequence] = [int(logprobs[-1].argmax())]
            outputs[sequence] += pending[sequence]
    behind = []
    for prompt, tokens in zip(prompts, outputs, strict=True):
        logprobs = reference_logprobs(exact, tokens)[len(prompt) - 1 : -1]
        drawn = torch.tensor(tokens[len(prompt) :], device=logprobs.device)
        chosen = logprobs.gather(1, drawn[:, None])[:, 0]
        behind.append(logprobs.max(-1).values - chosen)
    off = (torch.cat(behind) > NEAR_TIE).float().mean().item()
    assert off <= (0.0 if ours.config.moe is None else MISROUTED)

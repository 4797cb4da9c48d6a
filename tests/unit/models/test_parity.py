"""Every architecture computes the same as `transformers`, however its tokens are split into steps and batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from baton.engine.layers import decoder
from baton.engine.layers.norm import ResidualStream

from ...helpers.checkpoints import ARCHITECTURES, make_model
from ...helpers.paged import PagedRun, chunked_logprobs, greedy, random_tokens, reference_greedy, reference_logprobs
from .parity_pairs import VARIANTS, Pair, assert_close

pytestmark = pytest.mark.exhaustive

NEAR_TIE = 0.25  # of a logprob in bfloat16: about the largest rounding error in models of this size
# Share of an MoE model's tokens: rounding, which differs between CPUs, routes tokens whose experts are nearly tied to
# other experts, with errors of any size. That is 4 of 36 tokens on one CPU, 5 on another.
MISROUTED = 0.2
WHOLE = [*ARCHITECTURES, "gemma4_text-experts"]  # the variants that all tests use


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_equal_those_of_transformers_in_chunks_and_token_by_token(
    variant: str, pair: Callable[..., Pair]
) -> None:
    model, reference = pair(variant)
    tokens = random_tokens(100)  # longer than all sliding windows and original contexts of these variants
    expected = reference_logprobs(reference, tokens)
    for chunk in (100, 37, 16):
        assert_close(chunked_logprobs(model, tokens, chunk), expected, model)
    assert_close(chunked_logprobs(model, tokens[:40], 1), expected[:40], model)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*WHOLE, "llama-rope-llama3", "qwen3-yarn", "qwen2-window"])
def test_greedy_tokens_of_ragged_prompts_run_together_equal_those_of_transformers_alone(
    variant: str, pair: Callable[..., Pair]
) -> None:
    model, reference = pair(variant)
    prompts = [random_tokens(length, seed=length) for length in (1, 17, 50, 16)]
    assert greedy(model, prompts, 12) == [reference_greedy(reference, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("variant", WHOLE)
def test_decodes_and_prompt_chunks_share_a_step(variant: str, pair: Callable[..., Pair]) -> None:
    model, reference = pair(variant)
    sequences = [random_tokens(length, seed=length) for length in (40, 61, 33)]
    run = PagedRun(model, 3, 64)
    pieces: list[list[torch.Tensor]] = [[], [], []]
    # tokens of each sequence in each step: whole prompts, single tokens, chunks that start inside a block
    for counts in ((39, 7, 0), (1, 20, 32), (0, 33, 1), (0, 1, 0)):
        running = [sequence for sequence, count in enumerate(counts) if count]
        chunks = [(i, sequences[i][run.lens[i] : run.lens[i] + counts[i]]) for i in running]
        for sequence, logprobs in zip(running, run.step(chunks), strict=True):
            pieces[sequence].append(logprobs)
    for sequence, tokens in enumerate(sequences):
        assert_close(torch.cat(pieces[sequence]), reference_logprobs(reference, tokens), model)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", [*WHOLE, "qwen3-tied"])
def test_asking_for_some_tokens_gives_their_hidden_states_and_writes_the_kv_of_all(
    variant: str, dtype: str, pair: Callable[..., Pair]
) -> None:
    model, _ = pair(variant, dtype)
    tokens = torch.tensor(random_tokens(60))
    whole, asked = PagedRun(model, 1, 60), PagedRun(model, 1, 60)
    expected = model(tokens, whole.caches([0], [60], [60]))
    for wanted in ([], [59], [59, 0, 17]):
        index = torch.tensor(wanted, dtype=torch.int64)
        torch.testing.assert_close(model(tokens, asked.caches([0], [60], [60]), index), expected[index])
        torch.testing.assert_close(asked.arenas, whole.arenas, equal_nan=True)
        assert model.logits(expected[index]).shape == (len(wanted), 256)


@pytest.mark.parametrize("variant", WHOLE)
def test_layers_may_add_to_the_residual_in_place_as_on_a_gpu(
    variant: str, pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pair(variant)
    tokens, wanted = torch.tensor(random_tokens(60)), torch.tensor([59, 0, 17])
    run = PagedRun(model, 1, 60)
    expected = model(tokens, run.caches([0], [60], [60]))
    monkeypatch.setattr(decoder, "ResidualStream", lambda hidden, in_place: ResidualStream(hidden, in_place=True))
    torch.testing.assert_close(model(tokens, run.caches([0], [60], [60])), expected, rtol=1e-4, atol=1e-4)
    some = model(tokens, run.caches([0], [60], [60]), wanted)
    torch.testing.assert_close(some, expected[wanted], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", [*WHOLE, "qwen3-tied", "qwen3-yarn"])
def test_bfloat16_is_as_close_to_float32_as_transformers_in_bfloat16(variant: str, pair: Callable[..., Pair]) -> None:
    """Both round, at different places. Their errors are relative to results in float32 with the same bfloat16 weights.

    For MoE models only the half of the tokens with smaller errors counts: in both models, rounding may change the
    experts of others.
    """
    model, reference = pair(variant, "bfloat16")
    tokens = random_tokens(100)
    theirs = reference_logprobs(reference, tokens)
    ours = chunked_logprobs(model, tokens, 37)
    architecture, keys = VARIANTS[variant]
    exact_model = make_model(architecture, **keys)
    exact_model.load_state_dict({name: tensor.float() for name, tensor in reference.state_dict().items()})
    exact = reference_logprobs(exact_model, tokens)
    assert not ours.isnan().any()
    kept = len(tokens) if model.config.moe is None else len(tokens) // 2
    our_squares, their_squares = (
        (logprobs - exact).square().mean(-1).sort().values[:kept] for logprobs in (ours, theirs)
    )
    assert our_squares.mean() < 1.5**2 * their_squares.mean()
    our_largest, their_largest = ((logprobs - exact).abs().amax(-1).sort().values[:kept] for logprobs in (ours, theirs))
    assert our_largest.max() < 2 * their_largest.max()


@pytest.mark.parametrize("variant", WHOLE)
def test_bfloat16_greedy_tokens_are_the_best_of_transformers_or_nearly_tied_with_it(
    variant: str, pair: Callable[..., Pair]
) -> None:
    model, reference = pair(variant, "bfloat16")
    prompts = [random_tokens(length, seed=length) for length in (1, 17, 50)]
    behind = []
    for prompt, ours in zip(prompts, greedy(model, prompts, 12), strict=True):
        logprobs = reference_logprobs(reference, [*prompt, *ours])[len(prompt) - 1 : -1]
        chosen = logprobs.gather(1, torch.tensor(ours)[:, None])[:, 0]
        behind.append(logprobs.max(-1).values - chosen)
    off = (torch.cat(behind) > NEAR_TIE).float().mean().item()
    assert off <= (0.0 if model.config.moe is None else MISROUTED)

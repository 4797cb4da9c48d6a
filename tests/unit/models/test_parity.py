"""Every architecture computes what `transformers` computes, however its tokens are split into steps and batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.core.layout import StateLayout
from baton.engine.hf_config.rope import NO_ROPE, Rope
from baton.engine.layers import decoder
from baton.engine.layers.decoder import CausalLM
from baton.engine.layers.recurrent import part_of
from baton.engine.layers.residual import ResidualStream
from baton.engine.models import load_config, load_model

from ...helpers.checkpoints import ARCHITECTURES, ROPES, TIED, make_model, write_checkpoint
from ...helpers.paged import (
    PagedRun,
    chunked_logprobs,
    greedy,
    random_tokens,
    reference_greedy,
    reference_logprobs,
)

pytestmark = pytest.mark.exhaustive

TOLERANCE = 1e-4  # of a logprob, float32
RECURRENT_TOLERANCE = 5e-4  # states carry rounding from token to token: two ways of `transformers` differ by a third
SENSITIVE = 2  # a few positions are so: there one CPU's order of sums and another's differ by so many tolerances
NEAR_TIE = 0.25  # of a logprob, bfloat16: about the largest error that rounding makes in models of this size
# Of a mixture's tokens: rounding, which differs between CPUs, sends those whose experts are nearly tied to others, by
# any distance. One CPU has 4 of 36, another 5.
MISROUTED = 0.2

KINDS = ("full_attention", "sliding_attention")
GEMMA_4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40}
# name: (architecture, config keys): what the differences of an architecture, and options within one, look like
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{architecture: (architecture, {}) for architecture in ARCHITECTURES},
    **{f"{architecture}-tied": (architecture, {"tie_word_embeddings": True}) for architecture in TIED},
    **{f"llama-rope-{name}": ("llama", {"rope": rope}) for name, rope in ROPES.items()},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-head-dim": ("llama", {"head_dim": 48}),
    "mistral-unlimited": ("mistral", {"sliding_window": None}),
    "mistral-yarn": ("mistral", {"rope": ROPES["yarn"]}),
    "qwen2-yarn": ("qwen2", {"rope": ROPES["yarn"]}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3-yarn": ("qwen3", {"rope": ROPES["yarn"]}),
    "qwen3-yarn-attention-factor": ("qwen3", {"rope": {**ROPES["yarn"], "attention_factor": 1.5}}),
    "qwen3-yarn-mscale": ("qwen3", {"rope": {**ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "qwen3-yarn-betas": ("qwen3", {"rope": {**ROPES["yarn"], "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "deepseek_v2-low-rank-queries": ("deepseek_v2", {"q_lora_rank": 24, "attention_bias": True}),
    "deepseek_v2-unequal-heads": ("deepseek_v2", {"qk_nope_head_dim": 48, "v_head_dim": 16}),
    "deepseek_v2-yarn": ("deepseek_v2", {"rope": {**ROPES["yarn"], "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek_v2-yarn-mscales": ("deepseek_v2", {"rope": {**ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "deepseek_v2-all-sparse": ("deepseek_v2", {"first_k_dense_replace": 0, "n_shared_experts": 1}),
    "deepseek_v2-all-dense": ("deepseek_v2", {"first_k_dense_replace": 3}),
    "deepseek_v3-direct-queries": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek_v3-yarn": ("deepseek_v3", {"rope": {**ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v3-one-group": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}),
    "deepseek_v3-raw-weights": ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.0}),
    "deepseek_v3-null-is-false": ("deepseek_v3", {"norm_topk_prob": None}),
    "deepseek_v2-stray-keys": ("deepseek_v2", {"rope_interleave": False}),
    "mixtral-unlimited": ("mixtral", {"sliding_window": None, "num_experts_per_tok": 1}),
    "gpt_oss-yarn": (
        "gpt_oss",
        {"rope": {**ROPES["yarn"], "truncate": False, "beta_fast": 8.0}, "swiglu_alpha": 1.0, "swiglu_limit": 7.0},
    ),
    "gpt_oss-layer-types": (
        "gpt_oss",
        {"layer_types": ["full_attention", "full_attention", "sliding_attention"], "attention_bias": False},
    ),
    "gemma4_text-untied": ("gemma4_text", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma4_text-own-values": (
        "gemma4_text",
        {"attention_k_eq_v": False, "num_kv_shared_layers": 0, "num_hidden_layers": 2, "layer_types": [*KINDS][::-1]},
    ),
    "gemma4_text-many-shared": ("gemma4_text", {"num_kv_shared_layers": 4, "use_double_wide_mlp": False}),
    "gemma4_text-no-layer-inputs": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "final_logit_softcapping": None},
    ),
    "gemma4_text-experts": ("gemma4_text", GEMMA_4_EXPERTS),
    "gemma4_text-experts-own-caches": (
        "gemma4_text",
        {
            **GEMMA_4_EXPERTS,
            "top_k_experts": 3,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
        },
    ),
    "gemma4_text-half-rotated": (
        "gemma4_text",
        {
            "rope": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 2.0,
                },
                "sliding_attention": ROPES["linear"],
            }
        },
    ),
    "mimo_v2_flash-biases": ("mimo_v2_flash", {"attention_bias": True, "attention_value_scale": None}),
    "mimo_v2_flash-wide-values": ("mimo_v2_flash", {"head_dim": 48, "v_head_dim": 64}),
    "mimo_v2_flash-even": ("mimo_v2_flash", {"head_dim": 48, "v_head_dim": 48}),
    "mimo_v2_flash-groups": ("mimo_v2_flash", {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    "olmo2-biases": ("olmo2", {"attention_bias": True}),
    "olmo2-multi-head": ("olmo2", {"num_key_value_heads": None}),
    "olmo2-yarn": ("olmo2", {"rope": ROPES["yarn"]}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-untied": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2-layer-types": ("gemma2", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
    "gemma2-wide-heads": ("gemma2", {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "gemma3_text-one-rope": ("gemma3_text", {"rope": dict.fromkeys(KINDS, ROPES["theta"])}),
    "gemma3_text-layer-types": (
        "gemma3_text",
        {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma3_text-logit-cap": ("gemma3_text", {"final_logit_softcapping": 2.5, "tie_word_embeddings": False}),
    "gemma3_text-every-sixth": ("gemma3_text", {"sliding_window_pattern": 6, "num_hidden_layers": 7}),
    "qwen3_5_text-as-many-heads": ("qwen3_5_text", {"linear_num_key_heads": 4, "attention_bias": True}),
    "qwen3_5_text-interval": (
        "qwen3_5_text",
        {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_conv_kernel_dim": 3},
    ),
    "qwen3_5_text-half-rotated": ("qwen3_5_text", {"rope": {**ROPES["theta"], "partial_rotary_factor": 0.5}}),
    "olmo_hybrid-rotated": ("olmo_hybrid", {"rope": ROPES["theta"], "attention_bias": True}),
    "olmo_hybrid-yarn": ("olmo_hybrid", {"rope": ROPES["yarn"], "linear_conv_kernel_dim": 3}),
    "olmo_hybrid-no-negative-eigenvalues": ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
    "olmo_hybrid-sizes-of-attention": (
        "olmo_hybrid",
        {
            "layer_types": None,
            "hidden_size": 256,
            "num_key_value_heads": None,
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim"), None),
            "linear_key_head_dim": None,
        },
    ),
    "bamba-biases": ("bamba", {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}),
    "bamba-plain-conv": ("bamba", {"mamba_conv_bias": False, "mamba_d_conv": 3, "mamba_n_groups": 1}),
    "bamba-time-steps": ("bamba", {"time_step_limit": [0.05, 0.2]}),
    "falcon_h1-gate-first": ("falcon_h1", {"mamba_norm_before_gate": False}),
    "falcon_h1-no-norm": ("falcon_h1", {"mamba_rms_norm": False, "mamba_n_groups": 1}),
    "falcon_h1-expanded": ("falcon_h1", {"mamba_d_ssm": None, "mamba_d_head": "auto"}),
    "falcon_h1-plain": ("falcon_h1", {"ssm_multipliers": None, "mlp_multipliers": None, "key_multiplier": 1.0}),
    "granitemoehybrid-no-rope": ("granitemoehybrid", {"position_embedding_type": None}),
    "granitemoehybrid-dense": ("granitemoehybrid", {"num_local_experts": 0, "mamba_n_groups": 1}),
    "granitemoehybrid-biases": ("granitemoehybrid", {"attention_bias": True, "mamba_proj_bias": True}),
    "nemotron_h-no-latents": ("nemotron_h", {"moe_latent_size": None, "n_group": 1, "topk_group": 1}),
    "nemotron_h-dense": ("nemotron_h", {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}),
    "nemotron_h-biases": ("nemotron_h", {"use_bias": True, "norm_topk_prob": False}),
    "kimi_linear-low-rank-queries": ("kimi_linear", {"q_lora_rank": 24, "attention_bias": True}),
    "kimi_linear-narrow": (
        "kimi_linear",
        {"linear_num_heads": 2, "linear_conv_kernel_dim": 3, "layer_types": ["full_attention", "linear_attention"] * 2},
    ),
    "kimi_linear-dense-layers": (
        "kimi_linear",
        {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"], "moe_renormalize": False, "n_shared_experts": 2},
    ),
    "kimi_linear-one-group": ("kimi_linear", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}),
    "qwen3_next-raw-weights": ("qwen3_next", {"norm_topk_prob": False, "mlp_only_layers": []}),
    "qwen3_moe-raw-weights": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "qwen3_moe-dense-layer": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3_moe-every-second": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20}),
    # Keys of others' windows, which these leave unread.
    "llama-stray-keys": ("llama", {"use_sliding_window": True, "sliding_window": 20}),
    "mistral-stray-keys": ("mistral", {"use_sliding_window": False, "max_window_layers": 2}),
    "mixtral-stray-keys": ("mixtral", {"layer_types": ["full_attention"] * 3, "max_window_layers": 2}),
    "gpt_oss-stray-keys": ("gpt_oss", {"use_sliding_window": False}),
    "qwen3_moe-stray-keys": (
        "qwen3_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 2,
            "layer_types": ["full_attention"] * 3,
        },
    ),
}

WHOLE = [*ARCHITECTURES, "gemma4_text-experts"]  # those that are tried in every way

Pair = tuple[CausalLM, Any]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """(our model, the `transformers` model) of a variant, both from one checkpoint."""

    @functools.cache
    def make(variant: str, dtype: str = "float32") -> Pair:
        architecture, keys = VARIANTS[variant]
        folder = write_checkpoint(tmp_path_factory.mktemp(variant), architecture, dtype=dtype, **keys)
        return load_model(load_config(folder)), make_model(architecture, dtype=dtype, **keys)

    return make


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, model: CausalLM) -> None:
    assert not ours.isnan().any()
    tolerance = RECURRENT_TOLERANCE if model.config.has_states else TOLERANCE
    errors = (ours - theirs).abs().amax(1)
    assert errors.max().item() < SENSITIVE * tolerance
    assert (errors >= tolerance).sum().item() <= len(errors) / 50


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_equal_those_of_transformers_in_chunks_and_token_by_token(
    variant: str, pair: Callable[..., Pair]
) -> None:
    model, reference = pair(variant)
    tokens = random_tokens(100)  # beyond every sliding window and every original context of these variants
    expected = reference_logprobs(reference, tokens)
    for chunk in (100, 37, 16):
        assert_close(chunked_logprobs(model, tokens, chunk), expected, model)
    assert_close(chunked_logprobs(model, tokens[:40], 1), expected[:40], model)


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
    # how many tokens of each sequence every step runs: whole prompts, single tokens, chunks that start inside a block
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


@pytest.mark.parametrize("variant", [f"llama-rope-{name}" for name in ("theta", "linear", "llama3", "yarn")])
def test_a_rope_scaling_that_were_dropped_would_show(variant: str, pair: Callable[..., Pair]) -> None:
    model, reference = pair(variant)
    unscaled = load_model(dataclasses.replace(model.config, rope=pair("llama")[0].config.rope))
    tokens = random_tokens(100)
    error = (chunked_logprobs(unscaled, tokens, 100) - reference_logprobs(reference, tokens)).abs().max().item()
    assert error > 1000 * TOLERANCE


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("gemma2", {"embedding": 1.0}),
        ("gemma2", {"score": 32**-0.5}),
        ("gemma2", {"score_cap": None}),
        ("gemma2", {"logit_cap": None}),
        ("gemma3_text", {"embedding": 1.0}),
        ("gemma3_text", {"score": 32**-0.5}),
        ("gemma3_text-logit-cap", {"logit_cap": None}),
        ("mimo_v2_flash", {"attention_output": 1.0}),
        ("gemma4_text", {"embedding": 1.0}),
        ("gemma4_text", {"score": 32**-0.5}),
        ("gemma4_text", {"logit_cap": None}),
        ("falcon_h1", {"embedding": 1.0}),
        ("falcon_h1", {"score": 16**-0.5}),
        ("falcon_h1", {"attention_output": 1.0}),
        ("falcon_h1", {"mlp_gate": 1.0}),
        ("falcon_h1", {"mlp_output": 1.0}),
        ("falcon_h1", {"logit": 1.0}),
        ("granitemoehybrid", {"embedding": 1.0}),
        ("granitemoehybrid", {"score": 16**-0.5}),
        ("granitemoehybrid", {"attention_output": 1.0}),
        ("granitemoehybrid-dense", {"mlp_output": 1.0}),
        ("granitemoehybrid", {"logit": 1.0}),
    ],
)
def test_a_factor_or_a_cap_that_were_dropped_would_show(
    variant: str, change: dict[str, Any], pair: Callable[..., Pair]
) -> None:
    model, reference = pair(variant)
    config = dataclasses.replace(model.config, scales=dataclasses.replace(model.config.scales, **change))
    tokens = random_tokens(100)
    other = chunked_logprobs(load_model(config), tokens, 100)
    assert (other - reference_logprobs(reference, tokens)).abs().max().item() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        *(
            ("falcon_h1", {"multipliers": (1.2, 0.9, 0.8, 1.1, 0.7)[:part] + (3.0,) + (0.7,) * (4 - part)})
            for part in range(5)
        ),
        ("falcon_h1", {"output_multiplier": 1.0}),
        ("falcon_h1", {"norm": "gate first"}),
        ("falcon_h1-gate-first", {"norm": "norm first"}),
        ("granitemoehybrid", {"output_multiplier": 1.0}),
        ("bamba-time-steps", {"time_step_limits": (0.0, 0.2)}),
        ("bamba-time-steps", {"time_step_limits": (0.05, 9.0)}),
    ],
)
def test_a_part_of_mamba_that_were_computed_otherwise_would_show(
    variant: str, change: dict[str, Any], pair: Callable[..., Pair]
) -> None:
    model, reference = pair(variant)
    assert model.config.mamba is not None
    config = dataclasses.replace(model.config, mamba=dataclasses.replace(model.config.mamba, **change))
    tokens = random_tokens(100)
    other = chunked_logprobs(load_model(config), tokens, 100)
    assert (other - reference_logprobs(reference, tokens)).abs().max().item() > 20 * RECURRENT_TOLERANCE


@pytest.mark.parametrize("variant", ["bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "olmo_hybrid"])
@pytest.mark.parametrize("part", [0, 1], ids=["convolution", "state"])
def test_a_state_that_were_lost_between_chunks_would_show(variant: str, part: int, pair: Callable[..., Pair]) -> None:
    model, reference = pair(variant)
    tokens = random_tokens(100)
    run = PagedRun(model, 1, 100)
    run.step([(0, tokens[:64])])
    states = model.config.caches.groups[1].blocks
    assert isinstance(states, StateLayout)
    for layer in range(states.num_layers):
        part_of(run.arenas[1], states, layer, part).zero_()
    error = (run.step([(0, tokens[64:])])[0] - reference_logprobs(reference, tokens)[64:]).abs().max().item()
    assert error > 20 * RECURRENT_TOLERANCE


@pytest.mark.parametrize("variant", ["granitemoehybrid", "nemotron_h", "olmo_hybrid", "olmo_hybrid-rotated"])
def test_a_rotation_that_were_left_out_or_added_would_show(variant: str, pair: Callable[..., Pair]) -> None:
    model, reference = pair(variant)
    rope = Rope(500.0) if model.config.rope == NO_ROPE else NO_ROPE
    tokens = random_tokens(100)
    other = chunked_logprobs(load_model(dataclasses.replace(model.config, rope=rope)), tokens, 100)
    assert (other - reference_logprobs(reference, tokens)).abs().max().item() > 20 * RECURRENT_TOLERANCE


@pytest.mark.parametrize("variant", ["gemma3_text", "mimo_v2_flash"])
def test_a_rope_of_layers_with_a_window_that_were_dropped_would_show(variant: str, pair: Callable[..., Pair]) -> None:
    model, reference = pair(variant)
    tokens = random_tokens(100)
    other = chunked_logprobs(load_model(dataclasses.replace(model.config, window_rope=None)), tokens, 100)
    assert (other - reference_logprobs(reference, tokens)).abs().max().item() > 100 * TOLERANCE


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_a_context_beyond_the_stated_one_is_scaled_as_transformers_scales_it(kind: str, tmp_path: Path) -> None:
    """Dynamic scaling is that of the longest sequence that is served: here one of that very length."""
    keys: dict[str, Any] = {"rope": ROPES[kind], "max_position_embeddings": 64}
    folder = write_checkpoint(tmp_path, "llama", **keys)
    model = load_model(load_config(folder, max_model_len=120))
    tokens = random_tokens(120)
    assert_close(chunked_logprobs(model, tokens, 37), reference_logprobs(make_model("llama", **keys), tokens), model)


@pytest.mark.parametrize(
    "variant",
    [
        "mistral",
        "qwen2-window",
        "qwen3-window",
        "mixtral",
        "gpt_oss",
        "gemma2",
        "gemma3_text",
        "mimo_v2_flash",
        "gemma4_text",
    ],
)
def test_a_sliding_window_of_one_key_more_or_less_would_show(variant: str, pair: Callable[..., Pair]) -> None:
    model, reference = pair(variant)
    tokens = random_tokens(100)
    expected = reference_logprobs(reference, tokens)
    for change in (-1, 1):
        windows = tuple(window and window + change for window in model.config.layer_windows)
        other = load_model(dataclasses.replace(model.config, layer_windows=windows))
        assert (chunked_logprobs(other, tokens, 100) - expected).abs().max().item() > 100 * TOLERANCE


@pytest.mark.parametrize("variant", [*WHOLE, "qwen3-tied", "qwen3-yarn"])
def test_bfloat16_is_as_close_to_float32_as_transformers_in_bfloat16(variant: str, pair: Callable[..., Pair]) -> None:
    """Both round, at different places: neither is the truth. The yardstick is the same bfloat16 weights in float32.

    Of a mixture it is said of the nearer half of the tokens: rounding sends others to other experts, on either side.
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

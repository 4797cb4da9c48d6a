"""The engine on a GPU: every way to compute a token gives the same token, without the CPU in the step."""

from __future__ import annotations

import gc
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.engine import LLM, CompletionOutput, SamplingParams, StructuredOutputsParams
from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.requests.drafting import Drafting
from baton.engine.offline.bench_drafts import InformedDrafter
from baton.engine.startup import build

from .controls import agreed

pytestmark = pytest.mark.gpu
VOCAB_SIZE = 4096
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
HYBRID = {
    **CONFIG,
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
KINDS = pytest.mark.parametrize("config", [CONFIG, HYBRID], ids=["attention", "hybrid"])
PLAIN: dict[str, Any] = {"temperature": 1.0}
EVERYTHING: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 200,
    "top_p": 0.95,
    "min_p": 0.001,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
    "logit_bias": {5: 2.0, 9: -3.0},
    "bad_words_token_ids": [[11], [12, 13]],
    "min_tokens": 8,
    "stop_token_ids": [7],
}
TRUNCATED: dict[str, Any] = {"temperature": 1.5, "top_k": 200, "top_p": 0.95, "min_p": 0.001}


@pytest.fixture
def make() -> Iterator[Callable[..., LLM]]:
    """Return a function that makes engines of a small model with dummy weights, and closes the one before."""
    made: list[LLM] = []

    def build(folder: Path, config: dict[str, Any] = CONFIG, **args: Any) -> LLM:
        made.clear()
        gc.collect()
        torch.cuda.empty_cache()
        (folder / "config.json").write_text(json.dumps(config))
        small = {"load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 30}
        made.append(LLM(str(folder), **{**small, "max_num_seqs": 64, "max_num_batched_tokens": 2048, **args}))
        return made[0]

    yield build
    made.clear()
    gc.collect()
    torch.cuda.empty_cache()


def tokens(llm: LLM, lens: list[int], max_tokens: int = 40, **controls: Any) -> list[list[int]]:
    return [answer.token_ids for answer in answers(llm, lens, max_tokens, **controls)]


def answers(llm: LLM, lens: list[int], max_tokens: int = 40, **controls: Any) -> list[CompletionOutput]:
    prompts = prompts_of(lens)
    params = [
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=i, detokenize=False, **controls)
        for i in range(len(lens))
    ]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def prompts_of(lens: list[int]) -> list[list[int]]:
    """Return a random prompt of each length; the first ones do not depend on how many follow."""
    rng = random.Random(lens[0])
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lens]


LENS = [5, 700, 64, 1, 300, 17, 16, 90, 1200, 33, 250, 8]


@KINDS
@pytest.mark.parametrize("controls", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_one_step_in_flight_or_two_captured_or_not_the_tokens_are_the_same(
    make: Callable[..., LLM], tmp_path: Path, controls: dict[str, Any], config: dict[str, Any]
) -> None:
    """Steps are cut in the same way, so that only padding differs.

    Padded products may differ in a last bit, which can change a draw, and with it the answer.
    """
    expected = answers(make(tmp_path, config), LENS, logprobs=0, **controls)
    in_turns = answers(make(tmp_path, config, async_scheduling=False), LENS, logprobs=0, **controls)
    assert [answer.token_ids for answer in in_turns] == [answer.token_ids for answer in expected]
    eager = answers(make(tmp_path, config, enforce_eager=True), LENS, logprobs=0, **controls)
    same = sum(agreed(a, b) for a, b in zip(eager, expected, strict=True))
    assert same > 0.6 * sum(len(answer.token_ids) for answer in expected)


@pytest.mark.parametrize("errors", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("controls", [{"temperature": 0.0}, PLAIN, TRUNCATED], ids=["greedy", "plain", "truncated"])
def test_drafts_change_nothing_but_the_steps(
    make: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    controls: dict[str, Any],
    errors: float,
) -> None:
    """Answers may differ as above: kernels for other numbers of tokens add up in another order."""
    expected = answers(make(tmp_path), LENS, logprobs=0, **controls)
    whole = {
        tuple(prompt): [*prompt, *answer.token_ids] for prompt, answer in zip(prompts_of(LENS), expected, strict=True)
    }

    def drafting(core: EngineCoreConfig, device: str) -> Drafting:
        assert core.speculation is not None
        drafter = InformedDrafter(lambda _, prompt: whole[tuple(prompt)], 1 - errors, VOCAB_SIZE, may_differ=True)
        return Drafting(drafter, core.speculation.num_speculative_tokens, adapts=False, edits_on_host=device == "cuda")

    monkeypatch.setattr(build, "make_drafting", drafting)
    llm = make(tmp_path, speculative_config={"method": "suffix", "num_speculative_tokens": 3})
    runner: Any = llm.engine.core.runner
    results = []
    for lens in (LENS, LENS[:1]):
        eager = runner.captured.num_eager
        results.append(answers(llm, lens, logprobs=0, **controls))
        assert runner.captured.num_eager - eager <= 2  # the prompts
    same = sum(agreed(a, b) for a, b in zip(results[0], expected, strict=True))
    assert same > 0.6 * sum(len(answer.token_ids) for answer in expected)
    stats = llm.engine.core.stats()
    assert stats.num_late_compilations == 0
    assert stats.speculation is not None
    assert stats.speculation.num_draft_tokens > 100
    assert abs(stats.speculation.acceptance_rate - (1 - errors) ** 1.5) < 0.25


@pytest.mark.parametrize("args", [{}, {"speculative_config": {"method": "suffix"}}], ids=["", "drafts"])
def test_grammars_hold_and_change_nobody_elses_tokens(
    make: Callable[..., LLM], tmp_path: Path, args: dict[str, Any]
) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    llm = make(tmp_path, skip_tokenizer_init=False, **args)
    free = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=1)
    asked = StructuredOutputsParams(regex="([a-f]{3}-){1,9}end")
    fitting = SamplingParams(temperature=1.0, max_tokens=60, seed=1, structured_outputs=asked)
    prompts = [[5] * length for length in LENS]
    expected = [answer.outputs[0].token_ids for answer in llm.generate(prompts, free, use_tqdm=False)]
    answers = llm.generate(prompts * 2, [free] * len(prompts) + [fitting] * len(prompts), use_tqdm=False)
    free_answers = [answer.outputs[0].token_ids for answer in answers[: len(prompts)]]
    # Other batches add up in another order: a last bit may differ.
    assert sum(a == b for a, b in zip(free_answers, expected, strict=True)) >= len(prompts) - 2
    for answer in answers[len(prompts) :]:
        assert re.fullmatch(asked.regex or "", answer.outputs[0].text), answer.outputs[0].text
    stats = llm.engine.core.stats()
    assert stats.num_late_compilations == 0
    assert stats.speculation is None or stats.speculation.num_accepted_tokens > 20, "an end has one text"


@KINDS
def test_a_steady_decode_step_is_one_replay_and_writes_nothing(
    make: Callable[..., LLM], tmp_path: Path, config: dict[str, Any]
) -> None:
    llm = make(tmp_path, config)
    runner: Any = llm.engine.core.runner
    tokens(llm, [16, 16, 16], max_tokens=2)
    writes, eager = runner.writes.num_flushes, runner.captured.num_eager
    tokens(llm, [16, 16, 16], max_tokens=100)
    # The prompts, the first decode, each row's seven new blocks, and the rows that leave.
    assert runner.writes.num_flushes - writes <= 12
    assert runner.captured.num_eager == eager


@KINDS
def test_random_lengths_never_run_out_of_memory_and_compile_nothing(
    make: Callable[..., LLM], tmp_path: Path, config: dict[str, Any]
) -> None:
    llm = make(tmp_path, config, kv_cache_memory_bytes=None, gpu_memory_utilization=0.8, max_num_batched_tokens=8192)
    total = torch.cuda.mem_get_info()[1]
    assert torch.cuda.memory_reserved() / total < 0.82  # tests of other processes may use the GPU, too
    rng = random.Random(1)
    for _ in range(6):
        lens = [int(2 ** rng.uniform(0, 11.9)) for _ in range(rng.randint(1, 200))]
        controls = rng.choice([PLAIN, EVERYTHING, {"temperature": 0.0, "logprobs": 5, "prompt_logprobs": 3}])
        tokens(llm, lens, max_tokens=rng.randint(controls.get("min_tokens", 1), 60), **controls)
    assert llm.engine.core.stats().num_late_compilations == 0
    assert torch.cuda.memory_reserved() / total < 0.82


def test_an_engine_counts_no_kernels_that_were_compiled_before_it_was_ready(
    make: Callable[..., LLM], tmp_path: Path
) -> None:
    first = make(tmp_path)
    triton.knobs.runtime.jit_post_compile_hook(key="key", repr="somebody's", fn=None, compile={})
    assert first.engine.core.stats().num_late_compilations == 1
    assert make(tmp_path).engine.core.stats().num_late_compilations == 0

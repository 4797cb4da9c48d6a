"""On two and four GPUs in bfloat16, a model that is divided or has its experts spread answers as on one GPU.

An engine on several GPUs generates texts. An engine on one GPU then scores each text as a prompt, and must give every
token the same likelihood. This compares prefill and decode, captured and eager, with prefill on one device. Engines
run in processes of a pool: one that hangs on a device ends with its test.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import LLM, SamplingParams
from baton.engine.core.engine import EngineFailed
from baton.engine.core.messages import ExpertReview
from baton.engine.parallel import GroupFailed, Member

from ...helpers.checkpoints import MISROUTED, NEAR_TIE, write_checkpoint
from ...helpers.draft_layers import with_draft_layer
from ...helpers.local_member_processes import SOON_S, assert_members_end, cpu_seconds, members
from ...helpers.member_pool import MemberPool
from ...helpers.paged import random_tokens
from ...helpers.tiny_shapes import wide_shape

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]  # for cold starts; each process has a shorter limit
START_S = 240.0  # limit of an engine without cached kernels, with its answers
EXPERTS = {"enable_expert_parallel": True}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}  # prompts come twice, so answers repeat
MTP = {"method": "mtp", "num_speculative_tokens": 3}
MOVES = {"enable_eplb": True, "num_redundant_experts": 4, "eplb_step_interval": 5}
WAYS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "tp2-nccl": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
    "tp2-ep": {"tensor_parallel_size": 2, **EXPERTS},
    "dp2-ep": {"data_parallel_size": 2, **EXPERTS},
    "dp2-ep-nccl": {"data_parallel_size": 2, "disable_custom_all_reduce": True, **EXPERTS},
    "dp2-ep-eager": {"data_parallel_size": 2, "enforce_eager": True, **EXPERTS},
    "dp2-ep-all-to-all": {"data_parallel_size": 2, "all2all_backend": "all_to_all", **EXPERTS},
    "dp2-ep-moves": {"data_parallel_size": 2, **EXPERTS, **MOVES},
    "tp2-drafts": {"tensor_parallel_size": 2, "speculative_config": SUFFIX},
    "dp2-ep-drafts": {"data_parallel_size": 2, "speculative_config": SUFFIX, **EXPERTS},
    "tp2-mtp": {"tensor_parallel_size": 2, "speculative_config": MTP},
    "dp2-ep-mtp": {"data_parallel_size": 2, "speculative_config": MTP, **EXPERTS},
    "dp2-ep-mtp-eager": {"data_parallel_size": 2, "speculative_config": MTP, "enforce_eager": True, **EXPERTS},
}
WAYS_ON_FOUR: dict[str, dict[str, Any]] = {
    "tp4": {"tensor_parallel_size": 4},
    "tp4-ep": {"tensor_parallel_size": 4, **EXPERTS},
    "dp4-ep": {"data_parallel_size": 4, **EXPERTS},
    "tp2-dp2-ep": {"tensor_parallel_size": 2, "data_parallel_size": 2, **EXPERTS},
}
ARGS = {**WAYS, **WAYS_ON_FOUR}
CASES = [
    ("qwen3", "tp2"),
    ("qwen3", "tp2-nccl"),
    ("deepseek_v2", "tp2"),
    ("deepseek_v3", "tp2"),
    ("gpt_oss", "tp2"),
    ("qwen3_moe", "tp2"),
    ("qwen3_next", "tp2"),
    ("kimi_linear", "tp2"),
    ("nemotron_h", "tp2"),
    ("qwen3", "tp2-drafts"),
    ("qwen3_next", "tp2-drafts"),
    ("deepseek_v3 with a draft layer", "tp2-mtp"),
    ("qwen3_next with a draft layer", "tp2-mtp"),
    *((f"{name} with a draft layer", "dp2-ep-mtp") for name in ("deepseek_v3", "qwen3_next")),
    ("deepseek_v3 with a draft layer", "dp2-ep-mtp-eager"),
    ("qwen3_next", "dp2-ep"),
    *(("qwen3_moe", way) for way in WAYS if "ep" in way and "mtp" not in way),
    ("deepseek_v3", "dp2-ep"),
    ("gpt_oss", "dp2-ep-all-to-all"),
]
ON_FOUR = [
    ("qwen3", "tp4"),
    ("deepseek_v3", "tp4-ep"),
    ("qwen3_moe", "dp4-ep"),
    ("qwen3_moe", "tp2-dp2-ep"),
]
ON_CPUS = [("qwen3", "tp2"), ("qwen3_moe", "dp2-ep-moves")]
PROMPTS = [random_tokens(length, seed=length) for length in (2, 16, 17, 50, 90, 150)]
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=0
)
SCORED = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=0)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def write(architecture: str) -> Path:
        architecture, _, has_draft_layer = architecture.partition(" with ")
        folder = tmp_path_factory.mktemp(architecture)
        write_one = with_draft_layer if has_draft_layer else write_checkpoint
        return write_one(folder, architecture, dtype="bfloat16", **wide_shape(architecture))

    return write


def make(folder: Path, device: str, **args: Any) -> LLM:
    return LLM(
        str(folder),
        device=device,
        skip_tokenizer_init=True,
        max_num_seqs=16,
        max_num_batched_tokens=128,  # long prompts run in chunks
        num_gpu_blocks_override=256,
        enable_prefix_caching=False,
        distributed_timeout_seconds=30.0,
        **args,
    )


@dataclass(frozen=True)
class Text:
    """A prompt with its answer, and the logprobs of all tokens but the first."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Written:
    texts: list[Text]
    num_late_compilations: int
    experts: ExpertReview | None
    num_accepted_drafts: int


def write(member: Member, folder: Path, device: str, prompts: list[list[int]], args: dict[str, Any]) -> Written:
    """Generate answers in a process of the pool, twice for each prompt, as experts may move in between."""
    with make(folder, device, **args) as llm:
        texts = []
        for _ in range(2):
            for result in llm.generate(prompts, GREEDY, use_tqdm=False):
                (output,) = result.outputs
                read = [entry[token].logprob for token, entry in pairs(result.prompt_token_ids, result.prompt_logprobs)]
                said = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
                texts.append(Text(result.prompt_token_ids + output.token_ids, read + said))
        stats = llm.engine.core.stats()
        num_accepted = 0 if stats.speculation is None else stats.speculation.num_accepted_tokens
        written = Written(texts, stats.num_late_compilations, stats.experts, num_accepted)
    assert_members_end()
    del llm
    free_memory()
    return written


def score(member: Member, folder: Path, device: str, texts: list[list[int]]) -> tuple[list[list[float]], int]:
    """Return logprobs of all tokens but the first, and the number of late compilations, of an engine on one device."""
    with make(folder, device) as llm:
        results = llm.generate(texts, SCORED, use_tqdm=False)
        found = [
            [entry[token].logprob for token, entry in pairs(result.prompt_token_ids, result.prompt_logprobs)]
            for result in results
        ]
        num_late = llm.engine.core.stats().num_late_compilations
    del llm
    free_memory()
    return found, num_late


def pairs(tokens: list[int], entries: Any) -> Any:
    return zip(tokens[1:], entries[1:], strict=True)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("architecture", "way", "device"),
    [
        *(pytest.param(*case, "cuda", marks=pytest.mark.gpu(2)) for case in CASES),
        *(pytest.param(*case, "cuda", marks=pytest.mark.gpu(4)) for case in ON_FOUR),
        *((*case, "cpu") for case in ON_CPUS),
    ],
)
def test_every_token_is_as_likely_as_on_one_device_and_nothing_compiles_late(
    pool: MemberPool, folder_of: Callable[[str], Path], architecture: str, way: str, device: str
) -> None:
    folder = folder_of(architecture)
    (written,) = pool.run(write, folder, device, PROMPTS, ARGS[way], timeout_s=START_S)
    texts = [text.tokens for text in written.texts]
    assert len({tuple(text[-40:]) for text in texts}) >= len(PROMPTS)  # answers differ
    ((expected, num_late),) = pool.run(score, folder, device, texts, timeout_s=START_S)
    ours = [logprob for text in written.texts for logprob in text.logprobs]
    theirs = [logprob for text in expected for logprob in text]
    assert statistics.pstdev(theirs) > 4 * NEAR_TIE, "the logprobs are too much alike for a comparison"
    errors = sorted(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    off = sum(not error <= NEAR_TIE for error in errors) / len(errors)
    assert statistics.median(errors) < NEAR_TIE / 4
    assert off <= (0.01 if architecture == "qwen3" else MISROUTED)
    assert (written.num_late_compilations, num_late) == (0, 0)
    assert written.num_accepted_drafts > 10 or "drafts" not in way
    if "enable_eplb" in ARGS[way]:
        assert written.experts is not None
        assert written.experts.num_moves > 0


def rest(member: Member, folder: Path, device: str, args: dict[str, Any]) -> float:
    """Return the CPU cores that an idle group uses. This runs in a process of the pool."""
    with make(folder, device, **args) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        pids = [os.getpid(), *members()]
        assert len(pids) == 2
        before, begin = cpu_seconds(pids), time.monotonic()
        time.sleep(2.0)
        busy_s, elapsed_s = cpu_seconds(pids) - before, time.monotonic() - begin
    free_memory()
    return busy_s / elapsed_s


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("architecture", "way"), [("qwen3", "tp2"), ("qwen3_moe", "dp2-ep")])
def test_an_idle_group_uses_hardly_any_cpu_time(
    pool: MemberPool, folder_of: Callable[[str], Path], architecture: str, way: str
) -> None:
    (cores,) = pool.run(rest, folder_of(architecture), "cuda", WAYS[way], timeout_s=START_S)
    assert cores < 0.1


def lose_a_member(member: Member, folder: Path, device: str, args: dict[str, Any]) -> tuple[str, float]:
    """Kill a member in a step; return the error of `generate`, and the seconds until it. This runs in the pool."""
    llm = make(folder, device, **args)
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(members()[0], signal.SIGKILL)

    threading.Timer(0.1, kill).start()
    try:
        while True:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    except (EngineFailed, GroupFailed) as error:
        reason, elapsed_s = str(error), time.monotonic() - killed_at[0]
    llm.close()
    assert_members_end()
    return reason, elapsed_s


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("architecture", "way"), [("qwen3", "tp2"), ("qwen3", "tp2-nccl"), ("qwen3_moe", "dp2-ep")])
def test_a_member_that_dies_in_a_step_on_gpus_ends_the_engine_and_frees_its_devices(
    pool: MemberPool, folder_of: Callable[[str], Path], architecture: str, way: str
) -> None:
    folder = folder_of(architecture)
    ((reason, elapsed_s),) = pool.run(lose_a_member, folder, "cuda", WAYS[way], timeout_s=START_S)
    assert re.search(r"rank \d", reason)
    assert elapsed_s < SOON_S
    pool.close()
    (again,) = pool.run(write, folder, "cuda", PROMPTS[:1], WAYS[way], timeout_s=START_S)
    assert len(again.texts) == 2

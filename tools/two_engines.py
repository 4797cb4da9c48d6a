"""Measure a prefill and a decode engine on one GPU: in two processes, or as two threads of one process.

    python tools/two_engines.py MODEL                        # two processes, which take turns on the GPU
    python tools/two_engines.py MODEL --threads              # one process: both run at once, each in its own stream
    python tools/two_engines.py MODEL --threads --priority   # ... and the decode engine's stream goes first

For two processes that do not take turns, start CUDA's multi-process service (MPS) first: `nvidia-cuda-mps-control -d`.

No request is handed over: both engines have requests of their own, so only their shares of the GPU are measured. The
decode engine writes 64 answers all the time; the prefill engine reads prompts of 1024 tokens, 8 at a time. First the
decode engine is alone, then both work, then the prefill engine is alone. The result is a line of JSON for each engine:
tokens or prompts a second, and the time between two results in ms.

Weights are made up. MODEL is a folder with config.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier as ProcessBarrier
from typing import Any, Literal

from baton.engine import LLM, SamplingParams
from baton.engine.core.messages import EngineOutput

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
ALONE_S, TOGETHER_S = 4.0, 6.0  # of each engine alone, and of both
SETTLED_S = 0.5  # left out at the start of each part
START_S = 300.0
KV_BYTES = 20 << 30
PROMPT, ANSWER = 1024, 7000  # tokens; the answers do not end before the measurement does
SWITCH_S = 5e-4  # with a priority, Python's lock is handed over as soon as this


class _Over(Exception):
    """The measurement has ended."""


@dataclass(frozen=True)
class Result:
    """Tokens of one step, and when they came, in seconds since the start."""

    at_s: float
    num_tokens: int


def start(model: str, role: Role, *, priority: bool) -> LLM:
    """Return an engine that is warm."""
    import torch

    ordinary = torch.cuda.Stream
    if priority:  # the engine makes its stream while it starts
        torch.cuda.Stream = lambda device: ordinary(device, priority=-1 if role == "decode" else 0)  # type: ignore[misc,assignment]
    try:
        llm = LLM(
            model,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=ANSWER + PROMPT,
            max_num_seqs=256,
            max_num_batched_tokens=8 * PROMPT,
            kv_cache_memory_bytes=KV_BYTES,
        )
    finally:
        torch.cuda.Stream = ordinary  # type: ignore[misc]
    ask(llm, role, num_tokens=32, seed=0)
    return llm


def ask(llm: LLM, role: Role, num_tokens: int, seed: int) -> None:
    """Give the engine one batch of its kind of work."""
    vocab_size, draw = llm.engine.model_config.vocab_size, random.Random(seed)
    count, length, new = (8, PROMPT, 1) if role == "prefill" else (64, 16, num_tokens)
    prompts = [[draw.randrange(10, vocab_size) for _ in range(length)] for _ in range(count)]
    llm.generate(prompts, SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False), use_tqdm=False)


def work(llm: LLM, role: Role, start_s: float) -> None:
    """Work from the role's first second to its last, and print what was measured."""
    first, last = (0.0, ALONE_S + TOGETHER_S) if role == "decode" else (ALONE_S, 2 * ALONE_S + TOGETHER_S)
    results: list[Result] = []
    step = llm._step

    def timed_step() -> list[EngineOutput]:
        outputs, now = step(), time.monotonic() - start_s
        if num_tokens := sum(len(output.token_ids) for output in outputs):
            results.append(Result(now, num_tokens))
        if now > last:
            raise _Over
        return outputs

    llm._step = timed_step  # type: ignore[method-assign]
    time.sleep(max(0.0, start_s + first - time.monotonic()))
    try:
        for seed in range(1, sys.maxsize):
            ask(llm, role, ANSWER, seed)
    except _Over:
        pass
    alone = (0.0, ALONE_S) if role == "decode" else (ALONE_S + TOGETHER_S, last)
    both = (ALONE_S, ALONE_S + TOGETHER_S)
    figures = {name: summary(results, *part) for name, part in (("alone", alone), ("both", both))}
    print(json.dumps({"engine": role, **figures}), flush=True)


def summary(results: list[Result], begin_s: float, end_s: float) -> dict[str, Any]:
    part = [result for result in results if begin_s + SETTLED_S <= result.at_s < end_s]
    gaps_ms = sorted((after.at_s - before.at_s) * 1e3 for before, after in itertools.pairwise(part))
    rate = sum(result.num_tokens for result in part[1:]) / (part[-1].at_s - part[0].at_s)
    p50, p99 = (gaps_ms[int(share * (len(gaps_ms) - 1))] for share in (0.5, 0.99))
    return {"per_s": round(rate), "gap_ms_p50": round(p50, 2), "gap_ms_p99": round(p99, 2)}


def in_process(model: str, role: Role, ready: ProcessBarrier) -> None:
    llm = start(model, role, priority=False)
    ready.wait(START_S)
    work(llm, role, time.monotonic() + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", action="store_true", help="both engines in one process")
    parser.add_argument("--priority", action="store_true", help="with --threads: the decode engine's stream goes first")
    options = parser.parse_args()
    if options.priority and not options.threads:
        parser.error("--priority is between two streams of one process: give --threads")
    if not options.threads:
        spawn = multiprocessing.get_context("spawn")
        ready = spawn.Barrier(len(ROLES))
        processes = [spawn.Process(target=in_process, args=(options.model, role, ready)) for role in ROLES]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        sys.exit(max(abs(process.exitcode or 0) for process in processes))
    if options.priority:
        sys.setswitchinterval(SWITCH_S)
    engines = [(start(options.model, role, priority=options.priority), role) for role in ROLES]
    start_s = time.monotonic() + 1
    threads = [threading.Thread(target=work, args=(llm, role, start_s)) for llm, role in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for llm, _ in engines:
        llm.close()


if __name__ == "__main__":
    main()

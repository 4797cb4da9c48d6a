"""Measure engines on one GPU: the same work for each, through `LLM.generate`, in a process of its own.

    python tools/compare_engines.py MODEL --out results.jsonl                    # Baton, then vLLM
    python tools/compare_engines.py A B --engines vllm --together --kv-gib 16    # both start at once
    python tools/compare_engines.py MODEL --work drafts --baton '{"speculative_config": {...}}' --vllm '{...}'
    python tools/compare_engines.py --table results.jsonl

MODEL is a folder with config.json, as `tools/model_shapes.py` writes them. Each must be importable where this runs, or
under `--baton-path` or `--vllm-path`. `--baton` and `--vllm` are more arguments of an engine's `LLM`, as JSON.

Work, with fixed seeds, forced lengths, temperature 1 and no prefix caching:

    mixed      256 prompts of 100 to 1024 tokens, as many new tokens: output tokens per second
    decode     (time for 257 new tokens - time for 1) / 256, of 1, 64 and 256 requests
    ttft       a prompt of 128 tokens, one new token
    prefill    16 prompts of 4096, 2 of 32 768: tokens per second

and with `--work drafts`, 1, 8 and 64 requests (`--batch-sizes`) of 512 tokens that get 256: output tokens per second of
decoding, tokens in a step with drafts, and of Baton number and time of its steps by kind; without `speculative_config`,
only the first of these. Baton's own drafter is right with most drafts at the temperature that it gets there; vLLM can
be told how many it accepts (`rejection_sample_method`).

An engine that has started waits until no other one is being measured. With `--together`, engines of all models start
at the same time; give each its memory with `--kv-gib`, and measurements begin when the last one is ready. Each line of
results goes to `--out` as it comes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import turns

ENGINES = ("baton", "vllm")
SIZES = {"max_model_len": 40960, "max_num_seqs": 512, "max_num_batched_tokens": 16384}
DRAFTED_BATCHES = (1, 8, 64)  # requests at once, by default
DRAFTED_SIZES = {"max_model_len": 4096, "max_num_seqs": 64}  # or as many as the largest of `--batch-sizes`
GPU_SHARE = 0.85
DRAFTED_TEMPERATURE = {"baton": 20.0, "vllm": 1.0}  # at 20, random numbers decide nearly alone; vLLM allows 2 at most
NUM_RUNS = 3  # the shortest counts


# In an engine's process


class Engine:
    """An engine to measure. `run` returns seconds."""

    def __init__(self, name: str, model: Path, arguments: dict[str, Any]) -> None:
        module = __import__("baton.engine" if name == "baton" else "vllm", fromlist=["LLM", "SamplingParams"])
        self.name = name
        self._params = module.SamplingParams
        self._vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        options = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enable_prefix_caching": False, **arguments}
        start = time.perf_counter()
        self.llm = module.LLM(str(model), **options)
        self.start_s = time.perf_counter() - start

    def run(self, lengths: Sequence[int], outputs: Sequence[int], temperature: float = 1.0) -> float:
        rng = random.Random(f"{len(lengths)}/{lengths[0]}")
        prompts = [
            {"prompt_token_ids": [rng.randrange(10, self._vocab_size - 10) for _ in range(length)]}
            for length in lengths
        ]
        params = [
            self._params(max_tokens=n, min_tokens=n, temperature=temperature, ignore_eos=True, detokenize=False)
            for n in outputs
        ]
        start = time.perf_counter()
        results = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        num_new = sum(len(result.outputs[0].token_ids) for result in results)
        if num_new != sum(outputs):
            raise SystemExit(f"{num_new} tokens came back, {sum(outputs)} were asked for")
        return seconds

    def best(self, length: int, batch: int, new: int, temperature: float = 1.0) -> float:
        return min(self.run([length] * batch, [new] * batch, temperature) for _ in range(NUM_RUNS))

    @property
    def drafts_on_baton(self) -> bool:
        return self.name == "baton" and self.llm.engine.core.scheduler.drafting is not None

    def draft_counts(self) -> tuple[float, float]:
        """Return the steps of requests that had drafts, and the drafts that were accepted, so far."""
        if self.name == "baton":
            stats = self.llm.engine.core.stats().speculation
            return (stats.num_drafts, stats.num_accepted_tokens) if stats is not None else (0, 0)
        found = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        prefix = "vllm:spec_decode_num"
        return found.get(f"{prefix}_drafts", 0), found.get(f"{prefix}_accepted_tokens", 0)


class StepTimes:
    """The number of Baton's steps of each kind, and their mean time in ms: where time with drafts goes."""

    def __init__(self, engine: Engine) -> None:
        self.kinds: dict[str, tuple[int, float]] = {}
        drafting = engine.llm.engine.core.scheduler.drafting
        observe = drafting.observe

        def note(requests: int, drafts: int, prompts: int, seconds: float, guesses: int, **reads: bool) -> None:
            names = {"prompts": prompts, "drafts": drafts, "guesses": guesses, "late reads": reads["reads_late"]}
            kind = " + ".join(name for name, present in names.items() if present) or "plain"
            count, mean_ms = self.kinds.get(kind, (0, 0.0))
            self.kinds[kind] = count + 1, mean_ms + (seconds * 1e3 - mean_ms) / (count + 1)
            observe(requests, drafts, prompts, seconds, guesses, **reads)

        drafting.observe = note


def standard_work(engine: Engine, _: Sequence[int]) -> dict[str, float]:
    engine.run([128] * 8, [16] * 8)
    rng = random.Random(0)
    lengths, outputs = ([rng.randint(100, 1024) for _ in range(256)] for _ in range(2))
    figures = {"mixed_tok_s": sum(outputs) / min(engine.run(lengths, outputs) for _ in range(2))}
    for batch, context in ((1, 128), (64, 1024), (256, 1024)):
        span = engine.best(context, batch, 257) - engine.best(context, batch, 1)
        figures[f"decode_{batch}x{context}_ms"] = span / 256 * 1e3
    figures["ttft_128_ms"] = engine.best(128, 1, 1) * 1e3
    for batch, context in ((16, 4096), (2, 32768)):
        figures[f"prefill_{batch}x{context}_tok_s"] = batch * context / engine.best(context, batch, 1)
    return figures


def drafted_work(engine: Engine, batch_sizes: Sequence[int]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    temperature = DRAFTED_TEMPERATURE[engine.name]
    times = StepTimes(engine) if engine.drafts_on_baton else None
    for batch in batch_sizes:
        one = engine.best(512, batch, 1, temperature)
        steps, accepted = engine.draft_counts()
        if times is not None:
            times.kinds.clear()
        all_of_them = engine.best(512, batch, 256, temperature)
        steps_after, accepted_after = engine.draft_counts()
        figures[f"drafted_{batch}_tok_s"] = batch * 255 / (all_of_them - one)
        if steps_after > steps:
            figures[f"drafted_{batch}_length"] = 1 + (accepted_after - accepted) / (steps_after - steps)
        if times is not None:
            figures[f"drafted_{batch}_steps"] = dict(times.kinds)
    return figures


WORK = {"standard": standard_work, "drafts": drafted_work}


def engine_process(options: argparse.Namespace, name: str, model: Path) -> None:
    """Start an engine, wait for its turn, and print its figures."""
    sizes: dict[str, Any] = dict(SIZES)
    if options.work == "drafts":
        sizes = {**DRAFTED_SIZES, "max_num_seqs": max(DRAFTED_SIZES["max_num_seqs"], *options.batch_sizes)}
    if options.kv_gib:
        sizes["kv_cache_memory_bytes"] = round(options.kv_gib[0] * (1 << 30))
    if name == "baton" and not options.kv_gib:
        sizes["gpu_memory_utilization"] = GPU_SHARE
    elif name == "vllm":
        # With a size of its own for the cache, vLLM only asks whether this share is free.
        sizes["gpu_memory_utilization"] = 0.15 if options.kv_gib else GPU_SHARE
        sizes["disable_log_stats"] = options.work == "standard"
    if options.kv_cache_dtype:
        sizes["kv_cache_dtype"] = options.kv_cache_dtype
    more = json.loads(options.baton if name == "baton" else options.vllm)
    with turns.answers() as stream:
        engine = Engine(name, model, {"load_format": options.load_format, **sizes, **more})
        if turns.wait_for_turn(stream):
            figures = WORK[options.work](engine, options.batch_sizes)
            print(json.dumps({"start_s": engine.start_s, **figures}), file=stream)


# The process that starts the others


def started(
    options: argparse.Namespace,
    name: str,
    model: Path,
    kv_gib: float | None,
    environment: Mapping[str, str] | None = None,
) -> turns.Started:
    """Start the process of an engine."""
    path = options.baton_path if name == "baton" else options.vllm_path
    words = [sys.executable, __file__, str(model), "--process", name, "--work", options.work]
    words += ["--load-format", options.load_format, "--baton", options.baton, "--vllm", options.vllm]
    words += ["--batch-sizes", *map(str, options.batch_sizes)]
    words += ["--kv-cache-dtype", options.kv_cache_dtype] if options.kv_cache_dtype else []
    words += ["--kv-gib", str(kv_gib)] if kv_gib is not None else []
    log = Path(options.out).with_suffix(f".{model.name}.{name}.log")
    return turns.Started(words, log, dict(environment or {}, **({"PYTHONPATH": path} if path else {})))


def keep(options: argparse.Namespace, name: str, model: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Append an engine's figures to `--out`, and print them; none: it has failed."""
    row = {"model": model.name, "engine": name, "work": options.work, **(results[0] if results else {"failed": True})}
    with Path(options.out).open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def compare(options: argparse.Namespace) -> None:
    models = [Path(model) for model in options.models]
    sizes = options.kv_gib or [None]
    sizes = sizes * len(models) if len(sizes) == 1 else sizes
    asked = [(name, model, gib) for name in options.engines for model, gib in zip(models, sizes, strict=True)]
    batches = [asked] if options.together else [[each] for each in asked]
    for batch in batches:
        programs = [started(options, *each) for each in batch]
        for (name, model, _), results in zip(batch, turns.take_turns(programs), strict=True):
            keep(options, name, model, results)


def table(path: Path) -> str:
    """Return the figures as Markdown: for each model Baton, vLLM, and how many times better Baton is."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    models = list(dict.fromkeys(row["model"] for row in rows))
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:  # a later figure takes the place of an earlier one
        found.setdefault((row["model"], row["engine"]), {}).update(row)
    names = list(dict.fromkeys(name for row in rows for name in row if name.endswith(("_s", "_ms", "_length"))))
    lines = [["", *(cell for model in models for cell in (f"{model}: Baton", "vLLM", "ratio"))]]
    lines.append(["---", *["--:"] * 3 * len(models)])
    for name in names:
        cells = [name]
        for model in models:
            ours, theirs = (found.get((model, engine), {}).get(name) for engine in ENGINES)
            ratio = ours / theirs if ours and theirs else None
            if ratio is not None and not name.endswith(("tok_s", "_length")):
                ratio = 1 / ratio
            cells += [shown(value) for value in (ours, theirs, ratio)]
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--work", choices=list(WORK), default="standard")
    parser.add_argument(
        "--batch-sizes",
        nargs="+",
        type=int,
        default=DRAFTED_BATCHES,
        metavar="N",
        help="requests at once, of `--work drafts`",
    )
    parser.add_argument("--together", action="store_true", help="start all at the same time")
    parser.add_argument("--load-format", default="dummy", help="`auto` for weights in files")
    parser.add_argument("--kv-gib", nargs="+", type=float, help="for the KV cache: of all models, or of each")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--baton", default="{}", metavar="JSON")
    parser.add_argument("--vllm", default="{}", metavar="JSON")
    parser.add_argument("--baton-path", help="PYTHONPATH for Baton")
    parser.add_argument("--vllm-path", help="PYTHONPATH for vLLM")
    parser.add_argument("--out", default="results.jsonl")
    parser.add_argument("--table", type=Path, help="print what is in this file")
    parser.add_argument("--process", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table is not None:
        print(table(options.table))
    elif not options.models:
        parser.error("which MODEL?")
    elif options.process:
        engine_process(options, options.process, Path(options.models[0]))
    elif options.kv_gib and len(options.kv_gib) not in (1, len(options.models)):
        parser.error("--kv-gib: one size, or one for each MODEL")
    else:
        compare(options)


if __name__ == "__main__":
    main()

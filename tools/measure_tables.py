"""Measure tables of docs/benchmarks/README.md on one GPU of 140 GB: models, settings and sizes of caches are theirs.

    python tools/measure_tables.py FOLDER                          # all tables
    python tools/measure_tables.py FOLDER --tables hybrids fp8 --meanwhile 'pytest -m gpu tests/unit/kernels'

    hybrids   models with several kinds of caches, equal weights in files
    fp8       weights and cache in 8 bits
    drafts    draft layers, an EAGLE-3 head and a draft model
    pairs     a prefill and a decode engine, over HTTP

vLLM takes minutes to start, so as many engines as fit into the memory start at the same time. Then each is measured
alone, vLLM's and, after a start of their own, Baton's of the same comparisons. `--meanwhile` runs while vLLM's start.
FOLDER gets models, logs and results (`engines.jsonl`, `servers.jsonl`), which `compare_engines.py` and
`compare_servers.py` print as tables. Put it in memory-backed files: weights take up to 70 GB.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import compare_engines
import model_shapes
import turns

TOOLS = Path(__file__).parent
SIDES = ("vllm", "baton")
FIRST_PORT, PORTS = 8000, 1000  # of each server: its engines have others above it
GPU_GIB = 128.0
TURN_S = 240.0
TRITON_PREFILL = {"additional_config": {"gdn_prefill_backend": "triton"}}  # where FlashInfer is not installed
PAIR_CELLS = ("1024/128:1,8,64,256", "512/256:1,64,256", "8192/64:1,8")


@dataclass(frozen=True)
class Comparison:
    """Both engines with one model. `gib` is the GPU memory that either takes in all, `kv_gib` that of its caches."""

    shape: str
    gib: float
    kv_gib: Sequence[float]  # of an engine, or of a prefill and a decode engine
    weights: bool = False  # equal ones, in files
    kv_cache_dtype: str | None = None
    drafts: Mapping[str, Any] | None = None  # `speculative_config`; {folder}: that of all models
    accepted: float = 0.0  # tokens in a step that vLLM is told to accept, with drafts
    vllm: Mapping[str, Any] = field(default_factory=dict)  # more arguments of vLLM's `LLM`
    vllm_environment: Mapping[str, str] = field(default_factory=dict)
    cells: Sequence[str] = ()  # of a pair

    def engine_options(self, options: argparse.Namespace) -> argparse.Namespace:
        """Return what `compare_engines.py` is told of this comparison."""
        given: dict[str, dict[str, Any]] = {"baton": {}, "vllm": dict(self.vllm)}
        if self.drafts is not None:
            named = {name: _in_folder(value, options.folder) for name, value in self.drafts.items()}
            told = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": self.accepted}
            given["baton"]["speculative_config"] = named
            given["vllm"]["speculative_config"] = named | told
        return argparse.Namespace(
            **{side: json.dumps(more) for side, more in given.items()},
            work="standard" if self.drafts is None else "drafts",
            load_format="auto" if self.weights else "dummy",
            kv_cache_dtype=self.kv_cache_dtype,
            batch_sizes=compare_engines.DRAFTED_BATCHES,
            baton_path=options.baton_path,
            vllm_path=options.vllm_path,
            out=str(options.folder / "engines.jsonl"),
        )


def _in_folder(value: object, folder: Path) -> object:
    return value.replace("{folder}", str(folder)) if isinstance(value, str) else value


TABLES: dict[str, list[Comparison]] = {
    "hybrids": [
        Comparison("gemma3-4b", 63, [52]),
        Comparison("gpt-oss-20b", 56, [12], weights=True),
        Comparison("qwen3-next-8", 42, [10], weights=True, vllm=TRITON_PREFILL),
    ],
    "fp8": [
        # It would compile its products ahead for a quarter of an hour.
        Comparison("qwen3-8b-fp8", 41, [26], kv_cache_dtype="fp8", vllm_environment={"VLLM_DEEP_GEMM_WARMUP": "skip"}),
    ],
    "drafts": [
        Comparison(
            "qwen3-next-8-mtp",
            36,
            [8],
            drafts={"method": "mtp", "num_speculative_tokens": 3},
            accepted=3.7,
            vllm=TRITON_PREFILL,
        ),
        Comparison(
            "qwen3-8b-32k",
            30,
            [10],
            drafts={"method": "eagle3", "model": "{folder}/qwen3-8b-32k-eagle3", "num_speculative_tokens": 3},
            accepted=3.75,
        ),
        Comparison(
            "qwen3-8b",
            38,
            [14],
            drafts={"method": "draft_model", "model": "{folder}/qwen3-0.6b", "num_speculative_tokens": 3},
            accepted=3.7,
        ),
    ],
    "pairs": [
        Comparison("qwen3-0.6b", 52, [12, 30], cells=PAIR_CELLS),
        Comparison("qwen3-8b", 98, [20, 40], cells=PAIR_CELLS),
    ],
}


# What is started


def started(comparison: Comparison, side: str, port: int, options: argparse.Namespace) -> turns.Started:
    """Start one side of a comparison: an engine, or a pair behind a port, whose process also measures it."""
    environment = dict(comparison.vllm_environment if side == "vllm" else {})
    model = options.folder / comparison.shape
    if not comparison.cells:
        told = comparison.engine_options(options)
        return compare_engines.started(told, side, model, comparison.kv_gib[0], environment)
    words = [sys.executable, str(TOOLS / "compare_servers.py"), str(model), "--in-turn"]
    words += ["--servers", f"{side}-pd", "--gpus", "0", "--port", str(port), "--cells", *comparison.cells]
    words += ["--kv-gib", *map(str, comparison.kv_gib), "--baton", options.baton, "--vllm", options.vllm]
    words += ["--out", str(options.folder / "servers.jsonl")]
    environment |= {"PYTHONPATH": options.vllm_path} if options.vllm_path else {}
    return turns.Started(words, options.folder / f"{comparison.shape}.{side}-pd.log", environment)


def batches(comparisons: Sequence[Comparison], gpu_gib: float) -> Iterator[list[Comparison]]:
    """Yield comparisons whose engines fit into the memory together, in order."""
    batch: list[Comparison] = []
    for comparison in comparisons:
        if batch and sum(each.gib for each in [*batch, comparison]) > gpu_gib:
            yield batch
            batch = []
        batch.append(comparison)
    if batch:
        yield batch


def write_models(comparisons: Sequence[Comparison], folder: Path) -> None:
    shapes = {comparison.shape: comparison.weights for comparison in comparisons}
    for comparison in comparisons:
        for value in (comparison.drafts or {}).values():
            if isinstance(value, str) and value.startswith("{folder}/"):
                shapes.setdefault(value.removeprefix("{folder}/"), False)
    for shape, weights in shapes.items():
        if not (folder / shape).exists():
            model_shapes.write_config(folder / shape, model_shapes.SHAPES[shape])
            if weights:  # in a process of its own, which frees the GPU's memory when it ends
                words = [sys.executable, str(TOOLS / "model_shapes.py"), str(folder), shape, "--weights"]
                subprocess.run(words, check=True)


# In turn


def measure(batch: Sequence[Comparison], side: str, meanwhile: str, options: argparse.Namespace) -> None:
    """Start one side of all comparisons, run a command, and measure them one after the other."""
    programs = [started(each, side, FIRST_PORT + number * PORTS, options) for number, each in enumerate(batch)]
    if meanwhile:
        subprocess.run(meanwhile, shell=True, check=False)
    for comparison, results in zip(batch, turns.take_turns(programs, options.turn_s), strict=True):
        if not comparison.cells:
            told = comparison.engine_options(options)
            compare_engines.keep(told, side, options.folder / comparison.shape, results)
        print(time.strftime("%H:%M:%S"), side, comparison.shape, f"{len(results)} rows", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--gpu-gib", type=float, default=GPU_GIB, help="memory for engines that start together")
    parser.add_argument("--turn-s", type=float, default=TURN_S, help="longest time of one measurement")
    parser.add_argument(
        "--meanwhile", default="", metavar="COMMAND", help="what runs while engines of vLLM start first"
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--baton", default="baton", help="the command")
    parser.add_argument("--vllm", default="vllm", help="the command")
    parser.add_argument("--baton-path", help="PYTHONPATH for Baton")
    parser.add_argument("--vllm-path", help="PYTHONPATH for vLLM")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which ends the engines first
    comparisons = [comparison for table in options.tables for comparison in TABLES[table]]
    meanwhile = options.meanwhile
    for batch in batches(comparisons, options.gpu_gib):
        write_models(batch, options.folder)
        for side in options.sides:
            measure(batch, side, meanwhile, options)
            meanwhile = ""


if __name__ == "__main__":
    main()

"""Load a running server with other makers' clients beside Baton's own, and write docs/benchmarks/clients.md.

    python tools/foreign_clients.py --url http://127.0.0.1:8000 --model baton-demo --tokenizer configs/demo/model \\
        --vllm VENV/bin/python --guidellm VENV/bin/python --write

Each client sends the same number of requests of the same lengths, with the same number in flight: to completions, and
to chats. `--vllm` and `--guidellm` are the Pythons that have them; one that is left out is not run. vLLM as a client
needs neither a GPU nor CUDA's libraries: `pip install --no-deps vllm` beside PyTorch, and what it then says is missing.

The exit code is 1 where a request failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/benchmarks/clients.md"
TIMEOUT_S = 600.0
ROUTES = {"/v1/completions": "openai", "/v1/chat/completions": "openai-chat"}


@dataclass(frozen=True)
class Load:
    url: str
    model: str
    tokenizer: str
    num_requests: int
    in_flight: int
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Said:
    """The figures that a client reports. Times are milliseconds."""

    client: str
    route: str
    command: list[str]
    completed: int
    failed: int
    output_tokens: int
    output_throughput: float
    median_ttft_ms: float
    median_itl_ms: float


def run(command: list[str], *, is_ours: bool = False) -> str:
    """Run a client to its end, and return its output. Exits with it where the client fails."""
    print("$", shlex.join(command), flush=True)
    # Another environment's Python must not find this one's modules.
    environment = {name: value for name, value in os.environ.items() if is_ours or name != "PYTHONPATH"}
    done = subprocess.run(
        command, text=True, capture_output=True, timeout=TIMEOUT_S, check=False, env=environment, cwd=ROOT
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{done.stderr}\nexit code {done.returncode}")
    return done.stdout


def version(python: str, package: str) -> str:
    return run([python, "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]).strip()


def vllm(python: str, load: Load, route: str, folder: Path) -> Said:
    words = [
        *("vllm", "bench", "serve", "--backend", ROUTES[route], "--endpoint", route),
        *("--base-url", load.url, "--model", load.model, "--tokenizer", load.tokenizer),
        *("--dataset-name", "random", "--random-input-len", str(load.input_len)),
        *("--random-output-len", str(load.output_len), "--ignore-eos", "--num-prompts", str(load.num_requests)),
        *("--max-concurrency", str(load.in_flight), "--disable-tqdm"),
    ]
    kept = ["--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json"]
    run([python, "-m", "vllm.entrypoints.cli.main", *words[1:], *kept])
    return _vllms(f"vLLM {version(python, 'vllm')}", route, words, json.loads((folder / "vllm.json").read_text()))


def baton(load: Load, route: str, folder: Path) -> Said:
    words = [
        *("baton", "bench", "serve", "--url", load.url, "--backend", ROUTES[route]),
        *("--input-len", str(load.input_len), "--output-len", str(load.output_len)),
        *("--num-prompts", str(load.num_requests), "--max-concurrency", str(load.in_flight)),
    ]
    run(
        [sys.executable, "-m", "baton.cluster.cli.main", *words[1:], "--json", str(folder / "baton.json")], is_ours=True
    )
    return _vllms(
        f"Baton {importlib.metadata.version('baton')}", route, words, json.loads((folder / "baton.json").read_text())
    )


def _vllms(client: str, route: str, command: list[str], result: dict[str, Any]) -> Said:
    """Return a result with vLLM's names for its figures."""
    names = ("completed", "failed", "total_output_tokens", "output_throughput", "median_ttft_ms", "median_itl_ms")
    return Said(client, route, command, *(result[name] for name in names))


def guidellm(python: str, load: Load, route: str, folder: Path) -> Said:
    out = folder / "guidellm.json"
    words = [
        *("guidellm", "run", "--backend"),
        f"kind=openai_http,target={load.url},model={load.model},request_format={route}",
        *("--profile", f"kind=concurrent,streams={load.in_flight}"),
        *("--constraint", f"kind=max_requests,count={load.num_requests}"),
        *("--tokenizer", f"kind=hf_auto,model={load.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={load.input_len},output_tokens={load.output_len}"),
    ]
    run([python, "-m", "guidellm", *words[1:], "--output", f"kind=json,path={out}", "--disable-console"])
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    requests = metrics["request_totals"]
    return Said(
        f"GuideLLM {version(python, 'guidellm')}",
        route,
        words,
        requests["successful"],
        requests["errored"] + requests["incomplete"],
        round(metrics["output_token_count"]["successful"]["total_sum"]),
        metrics["output_tokens_per_second"]["successful"]["mean"],
        metrics["time_to_first_token_ms"]["successful"]["median"],
        metrics["inter_token_latency_ms"]["successful"]["median"],
    )


def page(load: Load, said: list[Said]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# Other makers' clients"
    yield ""
    yield "<!-- `python tools/foreign_clients.py --write` writes this page. -->"
    yield ""
    yield "After this page you know that load generators of other makers drive Baton unchanged, and with which words."
    yield ""
    about = (
        f"{time.strftime('%Y-%m-%d', time.gmtime())}; the demo model on two cores, which client and server share, so "
        f"that the rates say little: {load.num_requests} requests of {load.input_len} tokens, {load.output_len} tokens "
        f"of answer each, {load.in_flight} in flight. Each client counts by its own rules."
    )
    yield textwrap.fill(about, 120)
    yield ""
    yield "| client | route | answered | failed | output tokens | tokens/s | first token, ms | between tokens, ms |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    for each in said:
        yield (
            f"| {each.client} | `{each.route}` | {each.completed} | {each.failed} | {each.output_tokens:,} "
            f"| {each.output_throughput:,.0f} | {each.median_ttft_ms:.1f} | {each.median_itl_ms:.2f} |"
        )
    yield ""
    yield "The commands for completions; chats have the other route in its place:"
    yield ""
    yield "```sh"
    for each in said:
        if each.route == "/v1/completions":
            yield " \\\n    ".join(_lines(each.command))
    yield "```"
    yield ""
    yield "vLLM ran as a client alone, installed without its dependencies on CUDA, beside PyTorch's build for CPUs."
    yield "[LiteLLM](../reference/http.md) and the clients of OpenAI and Anthropic are driven in the tests."


def _lines(words: list[str]) -> Iterator[str]:
    """Break a command before options, so that its lines have at most 100 characters."""
    line = ""
    for word in map(shlex.quote, words):
        if line and word.startswith("--") and len(line) + len(word) > 60:
            yield line
            line = ""
        line += f" {word}" if line else word
    yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="baton-demo")
    parser.add_argument("--tokenizer", default="configs/demo/model")
    parser.add_argument("--vllm", default="")
    parser.add_argument("--guidellm", default="")
    parser.add_argument("--num-requests", type=int, default=100)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = vars(parser.parse_args())
    pythons, writes = {name: options.pop(name) for name in ("vllm", "guidellm")}, options.pop("write")
    load = Load(**options)
    said = []
    for route in ROUTES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            said.append(baton(load, route, folder))
            if pythons["vllm"]:
                said.append(vllm(pythons["vllm"], load, route, folder))
            if pythons["guidellm"]:
                said.append(guidellm(pythons["guidellm"], load, route, folder))
    text = "\n".join(page(load, said)) + "\n"
    print(text)
    if writes:
        PAGE.write_text(text)
    raise SystemExit(any(each.failed or each.completed != load.num_requests for each in said))


if __name__ == "__main__":
    main()

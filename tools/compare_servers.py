"""Measure servers of one model on this machine's GPUs, one after the other; `vllm bench serve` is the client of all.

    python tools/compare_servers.py MODEL --servers baton baton-pd vllm vllm-pd --kv-gib 16 32 --out results.jsonl
    python tools/compare_servers.py MODEL --gpus 0 1 --servers baton-two baton-pd vllm-pd   # a GPU for each engine
    python tools/compare_servers.py --table results.jsonl

    baton       one unified engine, everything else as Baton chooses it
    baton-two   two unified engines
    baton-pd    a prefill and a decode engine
    vllm        `vllm serve`
    vllm-two    two of them, as data-parallel ranks; needs two --gpus
    vllm-pd     two of them with its NixlConnector, and the proxy below

Two engines share one GPU, each with as many GiB of KV blocks as --kv-gib says; with two --gpus each has its own, and
chooses its memory. Servers of several GPUs can be measured at the same time, each pair with its --gpus and --port.

Must run where `vllm` can be imported; `--baton` and `--vllm` are the commands, where they need another environment.
MODEL is a folder with config.json and a tokenizer; weights are made up. Each server is asked for every length with
every number of clients, after a short warm-up for each length. Each figure is a line of JSON that goes to --out as it
comes; what is there already is not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

import turns

PREFILL, DECODE = 100, 200  # offsets from the port to those of a vLLM pair's engines
STARTS_S = 400.0
ENDS_S = 60.0
GIB = 1 << 30
FIGURES = ["output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms"]


# Servers


@contextmanager
def processes(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run commands, yield the last process once it has started, and end all of them afterwards.

    The last one starts when all others are ready. The others start together, also on one GPU: there each is told its
    memory, so none measures what is free.
    """
    started: list[subprocess.Popen[bytes]] = []
    with log.open("ab") as out:
        try:
            for command, environment in zip(commands, environments, strict=True):
                is_last = len(started) == len(commands) - 1  # the proxy of a pair, which answers at once
                for before, process in zip(commands, started, strict=False) if is_last else ():
                    wait_until_ready(f"http://127.0.0.1:{before[before.index('--port') + 1]}", process)
                variables = {**os.environ, **environment}
                started.append(subprocess.Popen(command, stdout=out, stderr=out, env=variables, start_new_session=True))
            yield started[-1]
        finally:
            for each in reversed(started):
                end(each)


def end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None or number is signal.SIGKILL:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                return
        try:
            process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            continue


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for /health. Raises `SystemExit` if no answer comes in time, or the process ends."""
    end_s = time.monotonic() + STARTS_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"{url}/health does not answer")


def require_free(port: int) -> None:
    """Raise `SystemExit` if a program listens at this port: it would be measured in place of the server."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise SystemExit(f"a program listens at port {port}: end it, or choose another with --port")


Commands = tuple[list[list[str]], list[dict[str, str]]]  # commands, and the variables that each adds to its environment


def baton(options: argparse.Namespace, folder: Path) -> Commands:
    command = [*shlex.split(options.baton), "serve", options.model, "--model-id", "m", "--load-format", "dummy"]
    return [[*command, "--port", str(options.port), *shlex.split(options.baton_options)]], [visible(options.gpus)]


def baton_two(options: argparse.Namespace, folder: Path) -> Commands:
    return baton_fleets(options, folder, {"unified": {"replicas": 2, **share_of_gpu(options, 0)}})


def baton_pair(options: argparse.Namespace, folder: Path) -> Commands:
    fleets = {role: share_of_gpu(options, index) for index, role in enumerate(("prefill", "decode"))}
    return baton_fleets(options, folder, fleets)


def share_of_gpu(options: argparse.Namespace, index: int) -> dict[str, Any]:
    if len(options.gpus) > 1:
        return {"num_gpus": 1}
    return {"num_gpus": 0.4, "engine": {"kv_cache_memory_bytes": round(options.kv_gib[index] * GIB)}}


def baton_fleets(options: argparse.Namespace, folder: Path, fleets: dict[str, Any]) -> Commands:
    application = {
        "model": options.model,
        "model_id": "m",
        "gateway": {"host": "127.0.0.1", "port": options.port, "drain_s": 0, "drain_timeout_s": 3},
        "engine": {"load_format": "dummy", "device": "cuda"},
        "fleets": fleets,
    }
    whole = {"name": "baton", "route_prefix": "/", "import_path": "baton.cluster.app:build_app", "args": application}
    config = folder / "fleets.yaml"  # JSON is YAML
    config.write_text(json.dumps({"proxy_location": "Disabled", "applications": [whole]}))
    command = [*shlex.split(options.baton), "serve", "--config", str(config), *shlex.split(options.baton_options)]
    return [command], [visible(options.gpus)]


def vllm(options: argparse.Namespace, folder: Path) -> Commands:
    return [[*vllm_command(options), "--port", str(options.port)]], [visible(options.gpus)]


def vllm_two(options: argparse.Namespace, folder: Path) -> Commands:
    command = [*vllm_command(options), "--port", str(options.port), "--data-parallel-size", "2"]
    return [command], [visible(options.gpus)]


def vllm_pair(options: argparse.Namespace, folder: Path) -> Commands:
    transfers = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    commands, environments = [], []
    for index, (offset, gib) in enumerate(zip((PREFILL, DECODE), options.kv_gib, strict=True)):
        port = options.port + offset
        command = [*vllm_command(options), "--port", str(port), "--kv-transfer-config", transfers]
        if len(options.gpus) == 1:
            # With a size of its own for the cache, vLLM only asks whether this share is free.
            memory = ["--kv-cache-memory-bytes", str(round(gib * GIB)), "--gpu-memory-utilization", "0.15"]
            command += memory
        commands.append(command)
        gpu = visible([options.gpus[index % len(options.gpus)]] if options.gpus else [])
        environments.append({"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 50), "UCX_NET_DEVICES": "all", **gpu})
    return [*commands, [sys.executable, __file__, "--proxy", "--port", str(options.port)]], [*environments, {}]


def vllm_command(options: argparse.Namespace) -> list[str]:
    command = [*shlex.split(options.vllm), "serve", options.model, "--served-model-name", "m", "--load-format", "dummy"]
    return [*command, "--no-enable-log-requests", *shlex.split(options.vllm_options)]


def visible(gpus: Sequence[int]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}


SERVERS: dict[str, Callable[[argparse.Namespace, Path], Commands]] = {
    "baton": baton,
    "baton-two": baton_two,
    "baton-pd": baton_pair,
    "vllm": vllm,
    "vllm-two": vllm_two,
    "vllm-pd": vllm_pair,
}


# vLLM's pair behind one port


def proxy(port: int) -> None:
    """Answer completions with two `vllm serve`: the first reads a prompt, the second writes the answer."""
    import aiohttp
    from aiohttp import web

    sessions: list[aiohttp.ClientSession] = []

    async def session(_: web.Application) -> AsyncIterator[None]:
        connections = aiohttp.TCPConnector(limit=0)
        sessions.append(aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(total=None)))
        yield
        await sessions[0].close()

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {"X-Request-Id": request.headers.get("X-Request-Id", os.urandom(8).hex())}
        asked = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        first = {**body, "stream": False, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": asked}
        first.pop("stream_options", None)
        url = f"http://127.0.0.1:%d{request.path}"
        async with sessions[0].post(url % (port + PREFILL), json=first, headers=headers) as read:
            read.raise_for_status()
            params = (await read.json()).get("kv_transfer_params")
        second = {**body, "kv_transfer_params": params}
        async with sessions[0].post(url % (port + DECODE), json=second, headers=headers) as written:
            response = web.StreamResponse(status=written.status, headers={"Content-Type": written.content_type})
            await response.prepare(request)
            async for piece in written.content.iter_any():
                await response.write(piece)
            return response

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    application = web.Application(client_max_size=1 << 30)
    application.cleanup_ctx.append(session)
    application.router.add_post("/v1/completions", answer)
    application.router.add_get("/health", health)
    web.run_app(application, host="127.0.0.1", port=port, print=None)


# The client of all


def bench(options: argparse.Namespace, length: str, clients: int, num_prompts: int, seed: int) -> dict[str, Any]:
    """Return what `vllm bench serve` measures of one length and one number of clients, with prompts of this seed."""
    from vllm.benchmarks.serve import add_cli_args, main_async

    input_len, output_len = length.split("/")
    given = f"--backend openai --base-url http://127.0.0.1:{options.port} --endpoint /v1/completions --model m"
    given += f" --tokenizer {options.model} --dataset-name random --ignore-eos --temperature 1.0 --disable-tqdm"
    given += f" --random-input-len {input_len} --random-output-len {output_len} --seed {seed}"
    given += f" --max-concurrency {clients} --num-prompts {num_prompts} --percentile-metrics ttft,tpot,itl"
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    result: dict[str, Any] = asyncio.run(main_async(parser.parse_args(given.split())))
    return result


def measure(options: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which ends the servers first
    out = Path(options.out)
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(row["model"], row["server"], row["length"], row["clients"]) for row in known}
    model = Path(options.model).name
    cells = [(length, clients) for length in options.lengths for clients in options.clients]
    if options.cells:
        named = [cell.partition(":") for cell in options.cells]
        cells = [(length, int(clients)) for length, _, given in named for clients in given.split(",")]
    with turns.answers() if options.in_turn else nullcontext() as stream:
        for server in options.servers:
            left = [cell for cell in cells if (model, server, *cell) not in done]
            for row in figures_of(server, left, options, stream) if left else ():
                line = json.dumps({"model": model, "server": server, **row})
                with out.open("a") as lines:
                    lines.write(line + "\n")
                if stream is not None:
                    print(line, file=stream)


def figures_of(
    server: str, cells: Sequence[tuple[str, int]], options: argparse.Namespace, stream: TextIO | None
) -> Iterator[dict[str, Any]]:
    """Start a server, wait for its turn if there is a `stream` to say so, and yield the figures of each cell."""
    require_free(options.port)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        commands, environments = SERVERS[server](options, Path(folder))
        log = Path(options.out).with_suffix(f".{Path(options.model).name}.{server}.log")
        with processes(commands, environments, log) as last:
            wait_until_ready(f"http://127.0.0.1:{options.port}", last)
            ready_s = time.monotonic() - began_s
            if stream is not None and not turns.wait_for_turn(stream):
                return
            for length in dict.fromkeys(length for length, _ in cells):
                bench(options, length, 8, 16, seed=0)
                for clients in [clients for each, clients in cells if each == length]:
                    result = bench(options, length, clients, num_prompts(length, clients), seed_of(length, clients))
                    counts = {"completed": result["completed"], "failed": result.get("failed", 0)}
                    figures = {name: result[name] for name in FIGURES}
                    yield {"length": length, "clients": clients, **counts, **figures, "ready_s": ready_s}


def seed_of(length: str, clients: int) -> int:
    """Return a seed of its own for each cell: with equal ones, long prompts would begin with the short ones."""
    return int(length.split("/")[0]) * 1000 + clients


def num_prompts(length: str, clients: int) -> int:
    """Return how many requests keep a server with so many clients busy for a while: fewer if they are long."""
    rounds = (4 if sum(map(int, length.split("/"))) < 4096 else 2) / (2 if clients > 64 else 1)
    return max(6, round(rounds * clients))


def table(path: Path) -> str:
    """Return the figures as Markdown: output tokens/s, TTFT and ITL with their medians and 99th percentiles."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    head = ["model", "in/out", "clients", "server", "tokens/s", "TTFT p50, ms", "p99", "ITL p50, ms", "p99", "failed"]
    lines = [head, ["---", "---", "--:", "---", *["--:"] * 6]]
    order = {server: index for index, server in enumerate(SERVERS)}
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    keys = [(row["model"], lengths.index(row["length"]), row["clients"], order[row["server"]]) for row in rows]
    for _, row in sorted(zip(keys, rows, strict=True), key=lambda pair: pair[0]):
        rate, *times = (row[name] for name in FIGURES)
        cells = [row["model"], row["length"], str(row["clients"]), row["server"], f"{rate:,.0f}".replace(",", " ")]
        lines.append(
            [*cells, *(f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in times), str(row["failed"])]
        )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--servers", nargs="+", choices=list(SERVERS), default=["baton", "baton-pd", "vllm", "vllm-pd"])
    parser.add_argument("--gpus", nargs="+", type=int, default=[], help="their numbers; two: each engine has its own")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--lengths", nargs="+", default=["512/256", "1024/128", "8192/64"], metavar="IN/OUT")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument(
        "--cells", nargs="+", metavar="IN/OUT:CLIENTS,...", help="in place of all clients for all lengths"
    )
    parser.add_argument("--kv-gib", nargs=2, type=float, default=[16.0, 32.0], metavar=("PREFILL", "DECODE"))
    parser.add_argument("--baton", default="baton", help="the command")
    parser.add_argument("--vllm", default="vllm", help="the command")
    parser.add_argument("--baton-options", default="", help="more options of `baton serve`")
    parser.add_argument("--vllm-options", default="", help="more options of each `vllm serve`")
    parser.add_argument("--out", default="results.jsonl")
    parser.add_argument("--table", type=Path, help="print what is in this file")
    parser.add_argument("--in-turn", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--proxy", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.proxy:
        proxy(options.port)
    elif options.table is not None:
        print(table(options.table))
    elif options.model is None:
        parser.error("which MODEL?")
    else:
        measure(options)


if __name__ == "__main__":
    main()

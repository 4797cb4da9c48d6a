"""`baton bench`: every measurement prints one JSON object, with `vllm bench`'s key names where it has them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_common import DEFAULT_URL, ApiKey, JsonFile, Url, engine_args_from, fail

if TYPE_CHECKING:
    from rich.table import Table

bench_app = typer.Typer(no_args_is_help=True)

ENGINE_ARGS = {"allow_extra_args": True, "ignore_unknown_options": True}

Model = Annotated[str, typer.Argument(help="A folder with config.json and safetensors.")]
Count = Annotated[int, typer.Option(min=1)]


@contextlib.contextmanager
def _refusals_shown() -> Iterator[None]:
    """Show what the engine refuses as a message, not a traceback: the caller can change it."""
    try:
        yield
    except ValueError as error:
        fail(str(error))


def _report(result: Mapping[str, Any], file: Path | None) -> None:
    typer.echo(json.dumps(result, indent=2))
    _write(result, file)


def _show(table: Table, result: object, file: Path | None) -> None:
    from rich.console import Console

    Console().print(table)
    _write(result, file)


def _write(result: object, file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n")


@bench_app.command(context_settings=ENGINE_ARGS)
def throughput(
    context: typer.Context,
    model: Model,
    num_prompts: Count = 100,
    input_len: Count = 128,
    output_len: Count = 128,
    seed: int = 0,
    json_file: JsonFile = None,
) -> None:
    """Run all prompts at once in one engine: requests and tokens per second.

    Any argument of the engine can be given by its name, as for `baton serve`.
    """
    from baton.engine.offline.bench import throughput as measure

    engine_args = engine_args_from(context.args)
    lengths = {"num_prompts": num_prompts, "input_len": input_len, "output_len": output_len}
    with _refusals_shown():
        result = measure(model, **lengths, seed=seed, engine_args=engine_args, progress=True)
    _report(result, json_file)


@bench_app.command(context_settings=ENGINE_ARGS)
def latency(
    context: typer.Context,
    model: Model,
    batch_size: Count = 8,
    input_len: Count = 32,
    output_len: Count = 128,
    num_iters_warmup: Annotated[int, typer.Option(min=0)] = 2,
    num_iters: Count = 10,
    seed: int = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure one batch in one engine: seconds from the first prompt token to the last output token."""
    from baton.engine.offline.bench import latency as measure

    with _refusals_shown():
        result = measure(
            model,
            batch_size=batch_size,
            input_len=input_len,
            output_len=output_len,
            num_iters_warmup=num_iters_warmup,
            num_iters=num_iters,
            seed=seed,
            engine_args=engine_args_from(context.args),
        )
    _report(result, json_file)


@bench_app.command(context_settings=ENGINE_ARGS)
def soak(
    context: typer.Context,
    model: Model,
    seconds: Annotated[float, typer.Option(min=1, help="How long new requests come.")] = 60,
    seed: int = 0,
    json_file: JsonFile = None,
) -> None:
    """Run random requests of every kind, more than fit; fails if one gets an error or memory is not given back."""
    from baton.engine.offline.soak import SoakFailed
    from baton.engine.offline.soak import soak as run

    try:
        with _refusals_shown():
            result = run(model, seconds=seconds, seed=seed, engine_args=engine_args_from(context.args), progress=True)
    except SoakFailed as error:
        fail(str(error), code=1)
    _report(result, json_file)


@bench_app.command(context_settings=ENGINE_ARGS)
def startup(
    context: typer.Context,
    model: Model,
    num_iters_cold: Annotated[int, typer.Option(min=0)] = 1,
    num_iters_warm: Annotated[int, typer.Option(min=0)] = 3,
    json_file: JsonFile = None,
) -> None:
    """Measure the seconds from the first import to an engine that is ready, each time in a new process."""
    from baton.engine.offline.bench import StartupFailed
    from baton.engine.offline.bench import startup as measure

    engine_args = engine_args_from(context.args)
    try:
        result = measure(model, num_iters_cold=num_iters_cold, num_iters_warm=num_iters_warm, engine_args=engine_args)
    except StartupFailed as error:
        fail(str(error), code=1)
    _report(result, json_file)


@bench_app.command()
def serve(
    url: Url = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option(help="Model to ask; by default the only one that the server has.")
    ] = None,
    num_prompts: Count = 100,
    input_len: Annotated[
        int, typer.Option("--input-len", "--random-input-len", min=1, help="Tokens of a prompt.")
    ] = 128,
    output_len: Annotated[
        int, typer.Option("--output-len", "--random-output-len", min=1, help="Tokens of an answer.")
    ] = 32,
    request_rate: Annotated[float, typer.Option(min=0.0, help="Requests a second; 0 sends all at once.")] = 0.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight at most.")] = None,
    num_warmups: Annotated[int, typer.Option(min=0)] = 1,
    seed: int = 0,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    tokenizer: Annotated[
        str | None, typer.Option(help="The model's folder, for servers that have no /tokenize.")
    ] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Also show where the time went, as the server says.")
    ] = False,
    api_key: ApiKey = None,
    json_file: JsonFile = None,
) -> None:
    """Load a running server with random prompts, and measure first token, time per token and throughput."""
    from .bench_serve import ServeLoad, ServerUnfit, measure

    load = ServeLoad(
        url=url,
        model=model,
        api_key=api_key,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        num_warmups=num_warmups,
        seed=seed,
        temperature=temperature,
        tokenizer=tokenizer,
        timeline=timeline,
    )
    try:
        result = measure(load)
    except ServerUnfit as error:
        fail(str(error), code=1)
    _report(result, json_file)


@bench_app.command()
def kernels(
    ops: Annotated[list[str] | None, typer.Argument(help="Names of ops; by default all.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Time the kernels of this machine: the share of the roof that each reaches."""
    from baton.kernels.bench import run_all, table

    with _refusals_shown():
        rows = run_all(ops or ())
    _show(table(rows), [dataclasses.asdict(row) for row in rows], json_file)


@bench_app.command()
def kv(
    model: Annotated[
        Path | None, typer.Argument(help="A folder with config.json, for the size of blocks; without it, 1.8 MB each.")
    ] = None,
    input_len: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a prompt; may be repeated.")] = None,
    in_flight: Annotated[list[int] | None, typer.Option(min=1, help="Prompts at once; may be repeated.")] = None,
    run_blocks: Annotated[
        int, typer.Option(min=1, help="Blocks that lie side by side; 1: each elsewhere, the worst case.")
    ] = 1,
    prefill_tp: Annotated[int, typer.Option(min=1, help="Ranks that hold the blocks, each its KV heads.")] = 1,
    decode_tp: Annotated[int, typer.Option(min=1, help="Ranks that read them.")] = 1,
    device: Annotated[str, typer.Option(help="'cpu' or 'cuda'.")] = "cpu",
    stages: Annotated[
        bool, typer.Option(help="Also show when each step of a hand-off is done, in microseconds.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure KV transfers between two groups of processes, beside raw NIXL moving the same bytes."""
    import torch

    from baton.engine.core.layout import UnevenHeads
    from baton.engine.hf_config.model_config import ModelConfig, ModelError
    from baton.kv_transfer.bench import DEFAULT_IN_FLIGHT, DEFAULT_LAYOUT, DEFAULT_TOKENS, measure, table
    from baton.kv_transfer.bench.ranks import BenchFailed

    if device not in ("cpu", "cuda"):
        fail(f"--device {device}: use cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch finds no GPU on this machine; use cpu", code=1)
    try:
        result = measure(
            DEFAULT_LAYOUT if model is None else ModelConfig.from_folder(str(model), load_format="dummy").layout,
            num_tokens=input_len or DEFAULT_TOKENS,
            in_flight=in_flight or DEFAULT_IN_FLIGHT,
            run_blocks=run_blocks,
            device=device,
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            stages=stages,
        )
    except (ModelError, UnevenHeads) as error:
        fail(str(error))
    except BenchFailed as error:
        fail(str(error), code=1)
    typer.echo(table(result))
    _write(result, json_file)


@bench_app.command()
def autoscale(
    trace: Annotated[Path | None, typer.Option(help="JSON lines in Mooncake's format; else tides and bursts.")] = None,
    num_prompts: Count = 3000,
    request_rate: Annotated[float, typer.Option(min=0.001, help="Mean requests a second.")] = 5.0,
    input_len: Annotated[int, typer.Option(min=4, help="Mean tokens of a prompt.")] = 1536,
    output_len: Count = 128,
    max_replicas: Annotated[int, typer.Option(min=1, help="Groups of each fleet, at most.")] = 4,
    start: Annotated[float, typer.Option(min=0, help="Seconds that a group takes to start.")] = 20.0,
    ttft: Annotated[float, typer.Option(min=0.001, help="Target for the first token, in seconds.")] = 2.0,
    inter_token: Annotated[float, typer.Option(min=0.001, help="Target between tokens, in seconds.")] = 0.05,
    downscale_delay: Annotated[float, typer.Option(min=0, help="Seconds before a fleet shrinks.")] = 60.0,
    seed: int = 0,
    json_file: JsonFile = None,
) -> None:
    """Simulate fleets in virtual time: the autoscaler beside Serve's default policy and fixed sizes."""
    import msgspec

    from baton.cluster.simulation.autoscaler_comparison import InvalidComparison, ScalingCase, compare, table
    from baton.cluster.simulation.traffic import InvalidTrace, TrafficShape

    shape = TrafficShape(num_prompts, request_rate, input_len, output_len, seed)
    try:
        rows = compare(ScalingCase(shape, trace, max_replicas, start, ttft, inter_token, downscale_delay))
    except (InvalidComparison, InvalidTrace) as error:
        fail(str(error))
    _show(table(rows), msgspec.to_builtins(rows), json_file)


@bench_app.command()
def router(
    unified: Annotated[int, typer.Option(min=0, help="Unified engines.")] = 16,
    prefill: Annotated[
        int, typer.Option(min=0, help="Prefill engines; with --decode, in the place of unified ones.")
    ] = 0,
    decode: Annotated[int, typer.Option(min=0, help="Decode engines.")] = 0,
    gateways: Count = 4,
    num_blocks: Annotated[int, typer.Option(min=1, help="KV blocks of each engine.")] = 8192,
    host_blocks: Annotated[
        int, typer.Option(min=0, help="Blocks that the host's memory has room for behind each engine's own.")
    ] = 0,
    disk_blocks: Annotated[int, typer.Option(min=0, help="Blocks that the disk has room for.")] = 0,
    link_gb_per_s: Annotated[
        float, typer.Option(min=1e-3, help="GB/s of the link of each engine, for hand-offs of an 8B model's KV.")
    ] = 131.0,
    trace: Annotated[Path | None, typer.Option(help="JSON lines in Mooncake's format; else random requests.")] = None,
    num_prompts: Count = 4000,
    request_rate: Annotated[float, typer.Option(min=0.001, help="Requests a second.")] = 48.0,
    input_len: Annotated[int, typer.Option(min=4, help="Mean tokens of a prompt.")] = 4096,
    output_len: Count = 64,
    policies: Annotated[
        list[str] | None, typer.Option("--policy", help="Policy to run; may be repeated. By default all.")
    ] = None,
    seed: int = 0,
    json_file: JsonFile = None,
) -> None:
    """Simulate routing policies on the same requests: real router, real schedulers, virtual time, no device."""
    import msgspec

    from baton.cluster.simulation.router_simulation import InvalidSimulation, SimulatedFleets, compare, table
    from baton.cluster.simulation.traffic import InvalidTrace, TrafficShape
    from baton.cluster.simulation.virtual_engine import KV_TOKEN_BYTES, Speed

    unified = 0 if prefill or decode else unified
    fleets = SimulatedFleets(unified, prefill, decode, num_blocks, gateways, host_blocks, disk_blocks)
    shape = TrafficShape(num_prompts, request_rate, input_len, output_len, seed)
    try:
        rows = compare(
            fleets, shape, trace, policies or (), Speed(kv_tokens_per_s=link_gb_per_s * 1e9 / KV_TOKEN_BYTES)
        )
    except (InvalidSimulation, InvalidTrace) as error:
        fail(str(error))
    _show(table(rows), msgspec.to_builtins(rows), json_file)

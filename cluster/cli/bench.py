"""`baton bench`: each measurement prints one JSON object, with the key names of `vllm bench` where it has them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from .cli_common import (
    ENGINE_ARGS,
    WIDE,
    EngineCommand,
    JsonFile,
    engine_args_from,
    fail,
    flat,
    in_a_folder,
    new_group,
    write_file,
)
from .known_models import GB
from .load.options import InvalidLoad, ServeLoad, as_options
from .options import (
    LONGEST_S,
    MOST,
    AutoscaleOptions,
    DraftsOptions,
    LatencyOptions,
    RouterOptions,
    ThroughputOptions,
    TransferOptions,
)

if TYPE_CHECKING:
    from rich.table import Table

    from baton.cluster.simulation.traffic import TrafficShape

bench_app = new_group()

ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report", dir_okay=False, callback=in_a_folder, help="Write an HTML report with plots to this file."
    ),
]
Model = Annotated[str, typer.Argument(help="Hugging Face model name, or a folder with config.json and safetensors.")]


class ServeCommand(TyperCommand):
    """`baton bench serve`, whose command line is parsed as `vllm bench serve` parses it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(as_options(args)))
        except InvalidLoad as error:
            fail(str(error))


@contextlib.contextmanager
def _refusals_shown() -> Iterator[None]:
    """Print an engine's `ValueError` as a message without a traceback: the caller can correct the arguments."""
    try:
        yield
    except ValueError as error:
        fail(str(error))


def _report(result: Mapping[str, Any], file: Path | None) -> None:
    typer.echo(json.dumps(result, indent=2))
    _write(result, file)


def _show(table: Table, result: object, file: Path | None) -> None:
    from rich.console import Console

    Console(width=WIDE).print(table)  # a narrow terminal would cut its figures
    _write(result, file)


def _write(result: object, file: Path | None) -> None:
    if file is not None:
        write_file(file, json.dumps(result, indent=2) + "\n")


@bench_app.command(cls=EngineCommand, context_settings=ENGINE_ARGS)
@flat
def throughput(context: typer.Context, model: Model, options: ThroughputOptions, json_file: JsonFile = None) -> None:
    """Measure the throughput of one engine that gets all prompts at once, in requests and tokens per second.

    Every engine argument is also an option, as for `baton serve`.
    """
    from baton.engine.offline.bench import RandomBatch
    from baton.engine.offline.bench import throughput as measure

    batch = RandomBatch(options.num_prompts, options.input_len, options.output_len, options.seed)
    with _refusals_shown():
        result = measure(model, batch, engine_args=engine_args_from(context.args), progress=True)
    _report(result, json_file)


@bench_app.command(cls=EngineCommand, context_settings=ENGINE_ARGS)
@flat
def latency(context: typer.Context, model: Model, options: LatencyOptions, json_file: JsonFile = None) -> None:
    """Measure the latency of one batch in one engine: seconds from the first prompt token to the last output token."""
    from baton.engine.offline.bench import RandomBatch
    from baton.engine.offline.bench import latency as measure

    batch = RandomBatch(options.batch_size, options.input_len, options.output_len, options.seed)
    with _refusals_shown():
        result = measure(
            model,
            batch,
            num_iters_warmup=options.num_iters_warmup,
            num_iters=options.num_iters,
            engine_args=engine_args_from(context.args),
        )
    _report(result, json_file)


@bench_app.command(cls=EngineCommand, context_settings=ENGINE_ARGS)
@flat
def drafts(context: typer.Context, model: Model, options: DraftsOptions, json_file: JsonFile = None) -> None:
    """Measure decode with speculative decoding in one engine, compared with the same engine without.

    By default, simulated drafts are right as often as --acceptance says. With --speculative-config, the engine's own
    drafter is measured. With --edit-every, `suffix` drafts from a prediction, as for a text that a client expects back
    with changes.
    """
    from baton.engine.offline.bench import RandomBatch
    from baton.engine.offline.bench_drafts import drafts as measure

    batches = [
        RandomBatch(size, options.input_len, options.output_len, options.seed) for size in options.batch_size or (1, 8)
    ]
    with _refusals_shown():
        result = measure(
            model,
            batches,
            num_drafts=options.num_drafts,
            acceptance=options.acceptance,
            edit_every=options.edit_every,
            engine_args=engine_args_from(context.args),
        )
    _report(result, json_file)


@bench_app.command(cls=EngineCommand, context_settings=ENGINE_ARGS)
def soak(
    context: typer.Context,
    model: Model,
    seconds: Annotated[
        float, typer.Option(min=1, max=LONGEST_S, help="Seconds during which new requests are sent.")
    ] = 60,
    seed: int = 0,
    json_file: JsonFile = None,
) -> None:
    """Overload one engine with random requests of every kind. Fails if a request fails or KV blocks leak."""
    from baton.engine.offline.soak import SoakFailed
    from baton.engine.offline.soak import soak as run

    try:
        with _refusals_shown():
            result = run(model, seconds=seconds, seed=seed, engine_args=engine_args_from(context.args), progress=True)
    except SoakFailed as error:
        fail(str(error), code=1)
    _report(result, json_file)


@bench_app.command(cls=EngineCommand, context_settings=ENGINE_ARGS)
def startup(
    context: typer.Context,
    model: Model,
    num_iters_cold: Annotated[int, typer.Option(min=0, max=MOST)] = 1,
    num_iters_warm: Annotated[int, typer.Option(min=0, max=MOST)] = 3,
    json_file: JsonFile = None,
) -> None:
    """Measure engine start-up: seconds from the first import until ready, in a new process each time."""
    from baton.engine.offline.bench import StartupFailed
    from baton.engine.offline.bench import startup as measure

    engine_args = engine_args_from(context.args)
    try:
        with _refusals_shown():
            result = measure(
                model, num_iters_cold=num_iters_cold, num_iters_warm=num_iters_warm, engine_args=engine_args
            )
    except StartupFailed as error:
        fail(str(error), code=1)
    _report(result, json_file)


@bench_app.command(cls=ServeCommand)
@flat
def serve(load: ServeLoad, json_file: JsonFile = None, report_file: ReportFile = None) -> None:
    """Load a running server, and measure TTFT, time per token and throughput.

    Prompts are random, or come from a file. Options have the names of `vllm bench serve` where it has them.

    Examples:

    baton bench serve --num-prompts 300 --request-rate 20 --burstiness 0.5 --report report.html

    baton bench serve --dataset-name sharegpt --dataset-path conversations.json --backend openai-chat

    baton bench serve --sweep-concurrency 1,4,16,64 --num-prompts 128 --json sweep.json --report sweep.html
    """
    from .load.client import ServerUnfit, measure
    from .load.figures import printed, save
    from .load.report import report

    try:
        result = measure(load)
    except InvalidLoad as error:
        fail(str(error))
    except ServerUnfit as error:
        fail(str(error), code=1)
    typer.echo(json.dumps(printed(result), indent=2))
    _write(result, json_file)
    if load.save_result or load.append_result:
        try:
            typer.echo(f"wrote {save(result, load)}", err=True)
        except OSError as error:
            fail(f"--save-result: {error}", code=1)
    if report_file is not None:
        write_file(report_file, report([result]))
        typer.echo(f"wrote {report_file}", err=True)


@bench_app.command()
def report(
    results: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="Result files written by `baton bench serve --json`."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", dir_okay=False, callback=in_a_folder, help="The HTML file to write.")
    ] = Path("report.html"),
) -> None:
    """Write an HTML report with plots that compares one or several results of `baton bench serve`."""
    from .load.report import NoResult, read_results
    from .load.report import report as make

    try:
        page = make([result for file in results for result in read_results(file)])
    except NoResult as error:
        fail(str(error))
    write_file(output, page)
    typer.echo(f"wrote {output}")


@bench_app.command()
def kernels(
    ops: Annotated[list[str] | None, typer.Argument(help="Kernels to measure. Default: all.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Time the kernels on this machine, and compare each with the limit of its memory bandwidth or compute."""
    from baton.kernels.bench import run_all, table

    with _refusals_shown():
        rows = run_all(ops or ())
    _show(table(rows), [dataclasses.asdict(row) for row in rows], json_file)


@bench_app.command()
@flat
def kv(options: TransferOptions, json_file: JsonFile = None) -> None:
    """Measure KV transfers between two groups of processes, compared with raw NIXL moving the same bytes."""
    import torch

    from baton.engine.core.layout import UnevenHeads
    from baton.engine.hf_config.errors import ModelError
    from baton.engine.models import load_config
    from baton.kv_transfer.bench import DEFAULT_LAYOUT, TransferCase, measure, table
    from baton.kv_transfer.bench.ranks import BenchFailed

    if options.device not in ("cpu", "cuda"):
        fail(f"--device {options.device}: use cpu or cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch finds no GPU on this machine; use cpu", code=1)
    case = TransferCase(
        num_tokens=options.input_len or TransferCase.num_tokens,
        in_flight=options.in_flight or TransferCase.in_flight,
        run_blocks=options.run_blocks,
        device=options.device,
        prefill_tp=options.prefill_tp,
        decode_tp=options.decode_tp,
        stages=options.stages,
    )
    try:
        model = options.model
        layout = DEFAULT_LAYOUT if model is None else load_config(model, load_format="dummy").caches.groups[0].kv
        needed, free = case.memory_bytes(layout), _free_bytes(options.device)
        if needed > free:
            fail(
                f"the blocks take {needed / GB:.1f} GB, and {free / GB:.1f} GB are free: give smaller --input-len, "
                "--in-flight or --run-blocks"
            )
        result = measure(layout, case)
    except (ModelError, UnevenHeads) as error:
        fail(str(error))
    except BenchFailed as error:
        fail(str(error), code=1)
    typer.echo(table(result))
    _write(result, json_file)


def _free_bytes(device: str) -> int:
    """Return the free memory of this machine, or of all its GPUs."""
    import torch

    from baton.engine.startup.memory import available_memory_bytes

    if device == "cpu":
        return available_memory_bytes()
    return sum(int(torch.cuda.mem_get_info(index)[0]) for index in range(torch.cuda.device_count()))


@bench_app.command()
@flat
def autoscale(options: AutoscaleOptions, json_file: JsonFile = None) -> None:
    """Simulate autoscaling in virtual time: Baton's autoscaler, Serve's default policy and fixed sizes."""
    import msgspec

    from baton.cluster.simulation.autoscaler_comparison import InvalidComparison, ScalingCase, compare, table
    from baton.cluster.simulation.traffic import InvalidTrace

    try:
        case = ScalingCase(
            shape=_traffic(options),
            trace_file=options.trace,
            most=options.max_replicas,
            start_s=options.start,
            ttft_s=options.ttft,
            inter_token_s=options.inter_token,
            downscale_delay_s=options.downscale_delay,
        )
        rows = compare(case)
    except (InvalidComparison, InvalidTrace) as error:
        fail(str(error))
    _show(table(rows), msgspec.to_builtins(rows), json_file)


@bench_app.command()
@flat
def router(options: RouterOptions, json_file: JsonFile = None) -> None:
    """Compare routing policies on the same requests: the real router and schedulers in virtual time, no GPU."""
    import msgspec

    from baton.cluster.simulation.router_simulation import InvalidSimulation, SimulatedFleets, compare, table
    from baton.cluster.simulation.traffic import InvalidTrace
    from baton.cluster.simulation.virtual_engine import KV_TOKEN_BYTES, SlowSpell, Speed

    fleets = SimulatedFleets(
        num_unified=0 if options.prefill or options.decode else options.unified,
        num_prefill=options.prefill,
        num_decode=options.decode,
        num_blocks=options.num_blocks,
        num_gateways=options.gateways,
        num_host_blocks=options.host_blocks,
        num_disk_blocks=options.disk_blocks,
        slow=SlowSpell(options.slow_times, options.slow_from, options.slow_until),
    )
    try:
        speed = Speed(kv_tokens_per_s=options.link_gb_per_s * 1e9 / KV_TOKEN_BYTES)
        rows = compare(fleets, _traffic(options), options.trace, options.policies or (), speed)
    except (InvalidSimulation, InvalidTrace) as error:
        fail(str(error))
    _show(table(rows, has_slow=options.slow_times > 1), msgspec.to_builtins(rows), json_file)


def _traffic(options: AutoscaleOptions | RouterOptions) -> TrafficShape:
    from baton.cluster.simulation.traffic import TrafficShape

    return TrafficShape(
        num_requests=options.num_prompts,
        rate_per_s=options.request_rate,
        prompt_tokens=options.input_len,
        output_tokens=options.output_len,
        seed=options.seed,
    )

"""The `baton` command. Each command imports its heavy dependencies itself, so that help appears at once."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .bench import bench_app
from .cli_common import (
    DEFAULT_URL,
    ENGINE_ARGS,
    ApiKey,
    EngineCommand,
    Url,
    engine_args_from,
    fail,
    flat,
    new_group,
    stdout_console,
)
from .options import PlanOptions, ServeOptions

if TYPE_CHECKING:
    from baton.cluster.contracts import EngineTrace

Address = Annotated[str, typer.Option(help="Address of the Ray cluster; 'auto' finds the one on this machine.")]
Application = Annotated[str, typer.Option("--app", help="Name of the application, as shown by `serve status`.")]
Interval = Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")]
Iterations = Annotated[int, typer.Option(min=0, help="Number of updates; 0: until Ctrl-C.")]

app = new_group(name="baton", add_completion=False, pretty_exceptions_show_locals=False)

app.add_typer(bench_app, name="bench", help="Measure engines, servers, kernels, transfers and policies.")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"baton {importlib.metadata.version('baton')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve large language models on Ray: prefill engines hand the KV cache over to decode engines."""


def main() -> None:
    """Run the console script."""
    _refuse_environment()
    _mount_eval()
    app()


def _refuse_environment() -> None:
    unknown = sorted(name for name in os.environ if name.startswith("BATON_"))
    if unknown:
        fail(f"{', '.join(unknown)}: Baton reads no environment variables; unset it and use an option or a config file")


def _mount_eval() -> None:
    """Add `baton eval` only when it is called, since its imports are heavy."""
    if sys.argv[1:2] == ["eval"]:
        from baton.cluster.cli.eval import eval_app
    else:
        eval_app = new_group()
    app.add_typer(eval_app, name="eval", help="Check the answers of a running server.")


@app.command(cls=EngineCommand, context_settings=ENGINE_ARGS)
@flat
def serve(context: typer.Context, options: ServeOptions) -> None:
    """Serve a model on this machine until Ctrl-C.

    Starts a Ray cluster, a gateway and the engines, and prints the URL, the engines and a request to try. A model of
    the Hugging Face Hub is downloaded first, into the cache of `hf`. The environment variable HF_TOKEN sets the Hub's
    access token, HF_ENDPOINT a mirror.

    Every engine argument is also an option, with vLLM's name: --max-num-seqs 128 --dtype bfloat16 ...

    Examples:

    baton serve Qwen/Qwen3-0.6B

    baton serve configs/demo/model --prefill 1 --decode 1

    baton serve --config configs/serve/demo.yaml --port 9000
    """
    from baton.cluster.logs import LogSettings, configure
    from baton.cluster.planning.model_checks import check_headers, check_model
    from baton.cluster.spec import InvalidSpec

    from .serve import application_spec, reads_weights, run

    engine_args = engine_args_from(context.args)
    short = {
        "tensor_parallel_size": options.tp,
        "data_parallel_size": options.dp,
        "enable_expert_parallel": options.ep or None,
    }
    for name, value in short.items():
        if value is not None and engine_args.setdefault(name, value) != value:
            long = f"--{name.replace('_', '-')}"
            fail(f"{long} {engine_args[name]} and its short form {value} say different things: leave one of them out")
    configure(LogSettings(), "serve", "serve")  # shows the progress of a download
    try:
        name, spec = application_spec(options, engine_args)
        check_model(spec)
        has_weights = reads_weights(spec, options.address)
        folder = check_headers(spec, with_weights=has_weights)
    except InvalidSpec as error:
        fail(str(error))
    raise SystemExit(run(spec, name, options.address, unchecked_weights=folder if has_weights else None))


@app.command()
def check(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Ray Serve config files, files with the args of one application, or cluster files for `ray up`."
        ),
    ],
) -> None:
    """Check config files without starting anything.

    If a model is not on this machine, the output names the checks that could not be made. The exit code is 1 if a file
    is invalid.
    """
    from baton.cluster.disks import full_disks
    from baton.cluster.spec import InvalidSpec

    from .plan import check_file

    failed = False
    for file in files:
        try:
            for line, whole in check_file(file):
                typer.secho(f"{file}: {line}", fg=typer.colors.GREEN if whole else typer.colors.YELLOW)
        except InvalidSpec as error:
            failed = True
            for line in str(error).splitlines():
                typer.secho(f"{file}: {line}", fg=typer.colors.RED, err=True)
    for disk in full_disks():
        typer.secho(f"this machine: {disk}", fg=typer.colors.YELLOW, err=True)
    raise SystemExit(1 if failed else 0)


@app.command()
@flat
def plan(options: PlanOptions) -> None:
    """Show on which nodes an application's ranks would run, how much memory they need, and what would be refused.

    Starts nothing and needs no GPU: the shapes come from the model's config.json.

    The exit code is 1 if something would be refused.

    Example:

    baton plan configs/serve/wide_ep.yaml --model configs/models/deepseek-v3 --gpu-memory 141
    """
    from baton.cluster.planning.fleet_memory import Traffic
    from baton.cluster.planning.placement import Machines
    from baton.cluster.planning.plan import make_plan
    from baton.cluster.planning.sizing import GB
    from baton.cluster.spec import InvalidSpec, specs_in_file

    from .plan import print_plan

    machines = Machines(
        options.gpus_per_node,
        int(options.gpu_memory * GB),
        options.nodes,
        memory_bytes=None if options.memory is None else int(options.memory * GB),
        disk_bytes=None if options.disk is None else int(options.disk * GB),
        has_fp8=options.fp8,
    )
    traffic = Traffic(options.load, options.prompt_tokens, options.output_tokens)
    try:
        specs = specs_in_file(options.file, model=options.model)
    except InvalidSpec as error:
        fail(f"{options.file}: {error}", code=1)
    plans = {name: make_plan(spec, machines, traffic) for name, spec in specs.items()}
    for name, made in plans.items():
        print_plan(stdout_console(), name, made)
    raise SystemExit(1 if any(made.refusals for made in plans.values()) else 0)


@app.command()
def status(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, for programs (fields: docs/operate/operations.md).")
    ] = False,
    is_watched: Annotated[
        bool, typer.Option("--watch", help="Repeat until Ctrl-C; with --json, print one line per update.")
    ] = False,
    interval: Interval = 2.0,
    iterations: Iterations = 0,
) -> None:
    """Show the engines and gateways of a running server.

    The exit code is 1 if no engine can serve a request, or if no gateway answers.
    """
    from .cli_common import Pace
    from .http_client import show_status

    pace = Pace(interval, iterations) if is_watched else None
    raise SystemExit(show_status(url, api_key, as_json=as_json, pace=pace))


@app.command()
def top(url: Url = DEFAULT_URL, api_key: ApiKey = None, interval: Interval = 2.0, iterations: Iterations = 0) -> None:
    """Show a live view of a running server's engines and gateways in the terminal, until Ctrl-C.

    Latencies, prefix hits and failures cover the last minute; rates cover the last ten seconds.
    """
    from .cli_common import Pace
    from .top import show_top

    show_top(url, api_key, Pace(interval, iterations))


@app.command()
def drain(
    rank: Annotated[int, typer.Argument(min=0, help="Rank of any engine in the group, as shown by `baton status`.")],
    address: Address = "auto",
    application: Application = "baton",
) -> None:
    """Replace a group of engines without losing an answer: its requests finish, then Serve starts another group.

    `baton status` no longer lists the group once it has ended. Requests that are still running after
    fleets.*.drain_timeout_s continue in other engines.
    """
    from baton.cluster.gateway.routing.ranks import spell_ranks
    from baton.cluster.membership.members import NoSuchRank

    from .ray_cluster import NoRayCluster, ask_directory, leave

    try:
        ranks: list[int] = ask_directory(address, application, "drain_rank", rank)
    except (NoRayCluster, NoSuchRank) as error:
        fail(str(error), code=1)
    finally:
        leave()
    typer.echo(f"rank {spell_ranks(ranks)} is draining; Serve then starts another group in its place")


@app.command()
def profile(
    seconds: Annotated[float, typer.Option(min=0.1, max=60.0, help="Length of the trace in seconds.")] = 5.0,
    address: Address = "auto",
    application: Application = "baton",
) -> None:
    """Profile the engines of an application with torch's profiler: one trace for each engine.

    Traces are files on the engines' nodes; https://ui.perfetto.dev opens them. Engines are slower while they record;
    Ctrl-C ends the recording early.
    """
    from .ray_cluster import NoRayCluster, ask_directory, leave

    try:
        begun: list[EngineTrace] = ask_directory(address, application, "profile", True)
        typer.echo(f"recording {', '.join(trace.engine_id for trace in begun) or 'nothing: no engine answers'}")
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(seconds if begun else 0.0)
        traces: list[EngineTrace] = ask_directory(address, application, "profile", False)
    except NoRayCluster as error:
        fail(str(error), code=1)
    finally:
        leave()
    for trace in traces:
        size_mb = trace.size_bytes / 1e6
        typer.echo(f"{trace.engine_id}: {trace.seconds:.1f} s, {size_mb:.1f} MB in {trace.path} on {trace.node_ip}")
    raise SystemExit(0 if traces else 1)


@app.command()
def chat(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Model name. Default: the server's only model.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of output tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.7,
) -> None:
    """Chat with a running server. An empty line or Ctrl-D ends the chat."""
    from .http_client import ChatSettings, run_chat

    run_chat(url, api_key, ChatSettings(model, system, max_tokens, temperature))


if __name__ == "__main__":
    main()

"""The `baton` command. Everything heavy is imported by the command that needs it, so that help comes at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from .cli_bench import bench_app
from .cli_words import DEFAULT_URL, ApiKey, Url, engine_args_from, fail

app = typer.Typer(
    name="baton",
    help="Serve large language models on Ray: prefill engines hand the KV cache over to decode engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

app.add_typer(bench_app, name="bench", help="Measure: throughput, latency, serve, startup, soak, kernels, kv.")


def main() -> None:
    """The console script."""
    _refuse_environment()
    _mount_eval()
    app()


def _refuse_environment() -> None:
    unknown = sorted(name for name in os.environ if name.startswith("BATON_"))
    if unknown:
        fail(f"{', '.join(unknown)}: Baton reads no environment variables; unset it and use an option or a config file")


def _mount_eval() -> None:
    """Imported only when it is asked for: it brings in what it evaluates with."""
    if sys.argv[1:2] == ["eval"]:
        from .eval.recall import eval_app
    else:
        eval_app = typer.Typer()
    app.add_typer(eval_app, name="eval", help="Check the answers of a running server.")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="A folder with config.json, safetensors and a tokenizer.")] = None,
    unified: Annotated[int | None, typer.Option(min=1, help="Engines that do both phases. The default: one.")] = None,
    prefill: Annotated[int | None, typer.Option(min=1, help="Engines that read prompts. Needs --decode.")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Engines that write answers. Needs --prefill.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help=r"Of the HTTP server.  \[default: 8000]")] = None,
    host: Annotated[str | None, typer.Option(help=r"Address to listen on.  \[default: 127.0.0.1]")] = None,
    model_id: Annotated[
        str | None, typer.Option("--model-id", "--served-model-name", help="What clients call the model.")
    ] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="A key that clients must send. May be repeated.")] = None,
    config: Annotated[Path | None, typer.Option(help="A Serve config file to take the application from.")] = None,
    tp: Annotated[int, typer.Option(help="Devices of one engine (tensor parallelism).")] = 1,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks of one engine.")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="Spread experts over the devices.")] = False,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster to join ('auto' finds the one on this machine).")
    ] = None,
) -> None:
    """Serve a model on this machine, and stop with Ctrl-C.

    Starts a Ray cluster, one gateway and the engines; prints the URL, the engines and a line to try.

    Any argument of the engines can be given by its name, as in vLLM: --max-num-seqs 128 --dtype bfloat16 ...

    Examples:

    baton serve configs/demo/model --prefill 1 --decode 1

    baton serve --config configs/serve/demo.yaml --port 9000
    """
    from .serve_command import Overrides, application_spec, run
    from .spec import InvalidSpec

    overrides = Overrides(model, model_id, unified, prefill, decode, host, port, api_key or [])
    engine_args = engine_args_from(context.args)
    engine_args |= {"tensor_parallel_size": tp} if tp != 1 else {}
    engine_args |= {"data_parallel_size": dp} if dp != 1 else {}
    engine_args |= {"enable_expert_parallel": True} if ep else {}
    try:
        name, spec = application_spec(config, overrides, engine_args)
    except InvalidSpec as error:
        fail(str(error))
    raise SystemExit(run(spec, name, address))


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Serve config files, or files with one application's args.")],
) -> None:
    """Check config files without starting anything; the exit code is 1 where one cannot work."""
    from .spec import InvalidSpec, specs_in_file

    failed = False
    for file in files:
        try:
            for name, spec in specs_in_file(file).items():
                fleets = ", ".join(f"{fleet.replicas} {role}" for role, fleet in spec.fleets.present.items())
                typer.secho(f"{file}: {name} is fine: {spec.served_model_id}, {fleets}", fg=typer.colors.GREEN)
        except InvalidSpec as error:
            failed = True
            typer.secho(f"{file}: {error}", fg=typer.colors.RED, err=True)
    raise SystemExit(1 if failed else 0)


@app.command()
def status(url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Show the engines of a running server."""
    from .client_commands import show_status

    raise SystemExit(show_status(url, api_key))


@app.command()
def chat(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="By default the only one that the server has.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.7,
) -> None:
    """Talk to a running server. An empty line or Ctrl-D ends."""
    from .client_commands import ChatSettings, run_chat

    raise SystemExit(run_chat(url, api_key, ChatSettings(model, system, max_tokens, temperature)))


if __name__ == "__main__":
    main()

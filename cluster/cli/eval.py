"""`baton eval`: checks of a running server's answers."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from baton.cluster.recall import MOST_TOKENS, RecallServer, evaluate, make_questions

from .cli_common import DEFAULT_URL, ApiKey, JsonFile, fail, flat, http_url, new_group, write_file
from .http_client import ModelList, decoded, gateway_client, reason

eval_app = new_group()
LENGTHS = (64, 128, 256, 512, 1000, 1500, 2000)


@eval_app.callback()
def _describe() -> None:
    """Check the answers of a running server."""


@dataclass(frozen=True, kw_only=True)
class RecallOptions:
    """`baton eval recall`."""

    url: Annotated[
        str,
        typer.Option(
            "--url", "--base-url", callback=http_url, help="URL of any OpenAI-compatible server with the demo model."
        ),
    ] = DEFAULT_URL
    model: Annotated[str | None, typer.Option(help="Model name. Default: the first one that the server lists.")] = None
    api_key: ApiKey = None
    api: Annotated[str, typer.Option(help="API to use: completions or chat.")] = "completions"
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")] = ",".join(
        map(str, LENGTHS)
    )
    samples: Annotated[int, typer.Option(min=1, help="Number of questions per length.")] = 30
    concurrency: Annotated[int, typer.Option(min=1, help="Number of concurrent requests.")] = 8
    seed: int = 0
    min_accuracy: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Exit with code 1 if the accuracy is lower.")
    ] = 0.0


@eval_app.command()
@flat
def recall(options: RecallOptions, json_file: JsonFile = None) -> None:
    """Check recall: ask for values from key-value lists of many lengths. The demo model answers 99 of 100 correctly."""
    if options.api not in ("completions", "chat"):
        fail(f"--api {options.api}: use completions or chat")
    try:
        wanted = [int(n) for n in options.lengths.split(",")]
    except ValueError:
        fail(f"--lengths {options.lengths}: give whole numbers with commas between them, such as 64,512")
    if max(wanted) > MOST_TOKENS:
        fail(f"--lengths {max(wanted)}: give {MOST_TOKENS} at most: longer lists would need more keys than there are")
    questions = make_questions(wanted, options.samples, options.seed)
    console, start = Console(stderr=True), time.perf_counter()
    try:
        with gateway_client(options.url, options.api_key) as client:
            model = options.model or decoded(client.get("/v1/models"), ModelList).data[0].id
        server = RecallServer(options.url, model, options.api_key, options.api)
        with Progress(console=console, transient=True) as progress:
            result = asyncio.run(evaluate(server, questions, options.concurrency, progress))
    except httpx.HTTPError as error:
        fail(reason(options.url, error), code=1)
    result["duration_s"] = round(time.perf_counter() - start, 2)
    _print_result(result, console)
    if json_file:
        write_file(json_file, json.dumps(result, indent=1) + "\n")
    raise typer.Exit(0 if result["accuracy"] >= options.min_accuracy else 1)


def _print_result(result: dict[str, Any], console: Console) -> None:
    table = Table("tokens", "asked", "right", "errors", title=f"recall: {result['accuracy']:.2%} right")
    for length, line in result["by_length"].items():
        table.add_row(length, str(line["asked"]), f"{line['accuracy']:.2%}", str(line["errors"]))
    console.print(table)
    for path, count in result["paths"].items():
        if path:
            console.print(f"{count} answers came by: {path}")

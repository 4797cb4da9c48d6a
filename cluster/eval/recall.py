"""`baton eval recall`: asks a server for single values out of long lists and counts the right answers.

The demo model answers at least 99 of 100 right at every length up to 2 000 tokens, so wrong answers point at the
server: at KV blocks that were lost, stale or misplaced on their way from prefill to decode.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from baton.cluster.cli.words import DEFAULT_URL, ApiKey, JsonFile, fail, http_url

from .task import TOKENS_PER_ANSWER, make_question

eval_app = typer.Typer(no_args_is_help=True)
LENGTHS = (64, 128, 256, 512, 1000, 1500, 2000)
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Question:
    length: int  # tokens of the prompt, about
    prompt: str
    answer: str


@dataclass
class Tally:
    """The answers to the questions of one length."""

    asked: int = 0
    right: int = 0
    errors: int = 0
    prompt_tokens: list[int] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        mean = sum(self.prompt_tokens) / len(self.prompt_tokens) if self.prompt_tokens else 0.0
        accuracy = self.right / self.asked if self.asked else 0.0
        return {"accuracy": accuracy, "asked": self.asked, "errors": self.errors, "mean_prompt_tokens": round(mean, 1)}


@dataclass(frozen=True)
class Server:
    """Where the questions go. `api` is `completions` (the text as it is) or `chat` (as one user message)."""

    base_url: str
    model: str | None
    api_key: str | None
    api: str

    async def ask(self, client: httpx.AsyncClient, model: str, question: Question) -> tuple[str, int, str]:
        """The answer's text, the prompt's tokens, and the way the server says it went. Raises `httpx.HTTPError`."""
        body: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": TOKENS_PER_ANSWER}
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": question.prompt}]
            response = await client.post("/v1/chat/completions", json=body)
        else:
            response = await client.post("/v1/completions", json=body | {"prompt": question.prompt})
        answer = response.raise_for_status().json()
        choice = answer["choices"][0]
        text = choice["message"]["content"] if self.api == "chat" else choice["text"]
        return text, answer["usage"]["prompt_tokens"], response.headers.get("x-baton-path", "")


def make_questions(lengths: Sequence[int], samples: int, seed: int) -> list[Question]:
    """`samples` questions of every length, mixed, the same ones for the same seed."""
    rng = random.Random(seed)
    questions = [Question(n, *make_question(rng, n)) for n in lengths for _ in range(samples)]
    rng.shuffle(questions)
    return questions


async def evaluate(
    server: Server, questions: Sequence[Question], concurrency: int, progress: Progress
) -> dict[str, Any]:
    """Asks everything, `concurrency` at a time. A request that fails counts as wrong and as an error.

    Raises `httpx.HTTPError` where the server does not even list its models.
    """
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    tallies = {question.length: Tally() for question in sorted(questions, key=lambda q: q.length)}
    paths: Counter[str] = Counter()
    bar = progress.add_task("asking", total=len(questions))
    gate = asyncio.Semaphore(concurrency)
    base_url = server.base_url.rstrip("/").removesuffix("/v1")

    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=TIMEOUT_S) as client:
        model = server.model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]

        async def ask(question: Question) -> None:
            tally = tallies[question.length]
            async with gate:
                try:
                    text, prompt_tokens, path = await server.ask(client, model, question)
                except httpx.HTTPError as error:
                    tally.errors += 1
                    progress.console.print(f"[red]{question.length} tokens: {error!r}")
                else:
                    tally.right += text.split() == question.answer.split()
                    tally.prompt_tokens.append(prompt_tokens)
                    paths[path] += 1
            tally.asked += 1
            progress.advance(bar)

        await asyncio.gather(*(ask(question) for question in questions))
    asked = sum(tally.asked for tally in tallies.values())
    return {
        "accuracy": sum(tally.right for tally in tallies.values()) / asked,
        "asked": asked,
        "errors": sum(tally.errors for tally in tallies.values()),
        "by_length": {str(length): tally.summary() for length, tally in tallies.items()},
        "paths": dict(paths),
        "model": model,
        "api": server.api,
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table("tokens", "asked", "right", "errors", title=f"recall: {result['accuracy']:.2%} right")
    for length, line in result["by_length"].items():
        table.add_row(length, str(line["asked"]), f"{line['accuracy']:.2%}", str(line["errors"]))
    console.print(table)
    for path, count in result["paths"].items():
        if path:
            console.print(f"{count} answers came by: {path}")


@eval_app.callback()
def _describe() -> None:
    """Check the answers of a running server."""


@eval_app.command()
def recall(
    url: Annotated[
        str,
        typer.Option(
            "--url", "--base-url", callback=http_url, help="Of any OpenAI-compatible server with the demo model."
        ),
    ] = DEFAULT_URL,
    json_file: JsonFile = None,
    model: Annotated[str | None, typer.Option(help="By default the first that the server has.")] = None,
    api_key: ApiKey = None,
    api: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, with commas.")] = ",".join(map(str, LENGTHS)),
    samples: Annotated[int, typer.Option(min=1, help="Questions of each length.")] = 30,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    seed: int = 0,
    min_accuracy: Annotated[float, typer.Option(min=0.0, max=1.0, help="Exit with 1 below this.")] = 0.0,
) -> None:
    """Ask for values out of key-value lists of many lengths. The demo model gets 99 of 100 right."""
    if api not in ("completions", "chat"):
        fail(f"--api {api}: use completions or chat")
    try:
        wanted = [int(n) for n in lengths.split(",")]
    except ValueError:
        fail(f"--lengths {lengths}: give whole numbers with commas between them, such as 64,512")
    questions = make_questions(wanted, samples, seed)
    server, console, start = Server(url, model, api_key, api), Console(stderr=True), time.perf_counter()
    try:
        with Progress(console=console, transient=True) as progress:
            result = asyncio.run(evaluate(server, questions, concurrency, progress))
    except httpx.HTTPError as error:
        fail(f"{url} does not answer: {error!r}", code=1)
    result["duration_s"] = round(time.perf_counter() - start, 2)
    show(result, console)
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    raise typer.Exit(0 if result["accuracy"] >= min_accuracy else 1)

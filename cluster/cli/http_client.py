"""`baton status` and `baton chat`: HTTP clients of a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import httpx
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.cluster.gateway.routing.ranks import spell_ranks
from baton.engine.core.speculation.stats import SpeculationStats

from .cli_common import Pace, fail, stdout_console, watch

ANSWER_S = 600.0  # a chat fails if the server is silent for so long
STATUS_S = 10.0  # the same for a gateway's state, which it knows at once
CONNECT_S = 5.0
ANOTHERS = "is it another program's address?"

T = TypeVar("T")


class ListedModel(msgspec.Struct):
    id: str


MANY_TOKENS = 4096  # length of the prompt for which the speed is shown


class ModelList(msgspec.Struct):
    """The answer of /v1/models, reduced to the fields that clients here need."""

    data: Annotated[list[ListedModel], msgspec.Meta(min_length=1)]


class RankList(msgspec.Struct):
    """The answer of /v1/cluster/ranks."""

    object: str
    gateway: str
    data: list[dict[str, Any]]
    gateways: list[dict[str, Any]]
    starting: list[dict[str, str]]


@dataclass(frozen=True)
class ChatSettings:
    model: str | None  # None: the first that the server has
    system: str | None
    max_tokens: int
    temperature: float


def print_ranks(console: Console, answer: dict[str, Any]) -> None:
    """Print the answer of /v1/cluster/ranks as tables."""
    for part in rank_tables(answer):
        console.print(part)


def rank_tables(answer: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the answer of /v1/cluster/ranks as tables."""
    yield _engine_table(answer["data"])
    if any(_step_times(rank) for rank in answer["data"]):
        yield _speed_table(answer["data"])
    if any(_speculation(rank) for rank in answer["data"]):
        yield _speculation_table(answer["data"])
    if any(rank["reads_from"] for rank in answer["data"]):
        yield _lane_table(answer["data"])
    yield _gateway_table(answer["gateways"])
    for group in answer["starting"]:
        yield Text(f"{group['group_id']} starts on {group['node_ip']}: {group['state']}")


def _narrow_table(title: str) -> Table:
    """Create a table in which the row of an engine fits in a terminal of 80 columns."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _engine_table(ranks: list[dict[str, Any]]) -> Table:
    table = _narrow_table("Engines")
    for column in ("rank", "role", "engine", "pid", "node", "run", "wait", "KV blocks free"):
        left = column in ("role", "engine", "node")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "KV blocks free")
    for rank in ranks:
        stats = rank["stats"] or {}
        waiting = stats["num_requests_waiting"] + stats["num_requests_waiting_for_kv"] if stats else "?"
        notes = ["drains"] * rank["draining"] + [f"circuit {rank['circuit']}"] * (rank["circuit"] != "closed")
        role = ", ".join([rank["role"], *notes])
        cells = (rank["rank"], role, rank["engine_id"], rank["pid"], rank["node_ip"])
        blocks = f"{stats.get('num_blocks_free', '?')}/{rank['num_blocks']}"
        table.add_row(*map(str, cells), known(rank["num_running"]), str(waiting), blocks)
    return table


def known(number: int | None) -> str:
    """Return a number as text, or a question mark if it is None."""
    return "?" if number is None else str(number)


def _step_times(rank: dict[str, Any]) -> dict[str, Any]:
    """Return the step times that an engine has measured, by kind of step; empty if the gateway does not reach it."""
    times = (rank["stats"] or {}).get("step_times") or {}
    return {kind: times[kind] for kind in ("prefill", "decode") if times.get(kind)}


def _speed_table(ranks: list[dict[str, Any]]) -> Table:
    """Create the table of the engines' step times (`docs/concepts/routing.md`)."""
    table = _narrow_table("Measured lately")
    for column in ("engine", "prompt tokens/s", "ms a decode step", "ms more a request"):
        table.add_column(column, justify="left" if column == "engine" else "right", no_wrap=True)
    for rank in ranks:
        times = _step_times(rank)
        prefill, decode = times.get("prefill"), times.get("decode")
        tokens = None
        if prefill and prefill["unit_s"]:  # prompts that are all short do not tell it
            tokens = MANY_TOKENS / (prefill["base_s"] + MANY_TOKENS * prefill["unit_s"])
        step_ms = 1e3 * (decode["base_s"] + decode["unit_s"]) if decode else None
        more_ms = 1e3 * decode["unit_s"] if decode and decode["unit_s"] else None
        shown = (
            ("?" if figure is None else f"{figure:{form}}")
            for figure, form in zip((tokens, step_ms, more_ms), (",.0f", ".1f", ".3f"), strict=True)
        )
        table.add_row(rank["engine_id"], *shown)
    return table


def _speculation(rank: dict[str, Any]) -> SpeculationStats | None:
    """Return an engine's counts of drafts; None if it has checked none."""
    counted = msgspec.convert((rank["stats"] or {}).get("speculation") or {}, SpeculationStats)
    return counted if counted.num_drafts else None


def _speculation_table(ranks: list[dict[str, Any]]) -> Table:
    """Create the table of the draft tokens that engines have checked since they started."""
    table = _narrow_table("Speculation")
    for column in ("engine", "drafts", "accepted", "tokens a request and step with drafts"):
        table.add_column(column, justify="left" if column == "engine" else "right", no_wrap=True)
    for rank in ranks:
        if counted := _speculation(rank):
            drafts, drawn = f"{counted.num_draft_tokens:,}", f"{counted.mean_length:.1f}"
            table.add_row(rank["engine_id"], drafts, f"{counted.acceptance_rate:.0%}", drawn)
    return table


def _lane_table(ranks: list[dict[str, Any]]) -> Table:
    """Create the table of the transports over which engines read each other's KV blocks."""
    table = _narrow_table("Hand-offs")
    for column in ("reader", "reads from", "over", "GB/s"):
        table.add_column(column, justify="right" if column == "GB/s" else "left", no_wrap=True)
    for rank in ranks:
        for lane in rank["reads_from"]:
            rate = "?" if lane["bytes_per_s"] is None else f"{lane['bytes_per_s'] / 1e9:.1f}"
            rate = f"[red]{rate}: TCP?[/]" if lane["is_slow"] else rate
            table.add_row(rank["engine_id"], lane["engine_id"], lane["transport"], rate)
    return table


def _gateway_table(gateways: list[dict[str, Any]]) -> Table:
    table = _narrow_table("Gateways")
    for column in ("node", "port", "pid", "load balancing", "ranks"):
        table.add_column(column, justify="right" if column in ("port", "pid") else "left", no_wrap=column != "ranks")
    for gateway in gateways:
        cells = (gateway["node_ip"], gateway["port"], gateway["pid"], gateway["load_balancing"])
        table.add_row(*map(str, cells), spell_ranks(gateway["ranks"]))
    return table


def show_status(url: str, api_key: str | None, *, as_json: bool, pace: Pace | None = None) -> int:
    """Print engines and gateways, for people or as JSON (docs/operate/operations.md); repeatedly with `pace`.

    Return the exit code: 1 if no engine can serve. If no gateway answers, end the command with an error; with `pace`,
    only the first time.
    """
    with gateway_client(url, api_key) as client:
        state = _State(client)
        try:
            state.update()
            if as_json:
                print(state.json(indent=2 if pace is None else None), flush=True)
            elif pace is None:
                stdout_console().print(state.tables())
        except httpx.HTTPError as error:
            fail(reason(url, error), code=1)
        if pace is not None:
            watch(pace, lambda: state.line_or_tables(url, as_json=as_json), is_first_drawn=as_json)
    return 0 if state.is_ready else 1


class _State:
    """The newest answers of a server about its state."""

    def __init__(self, client: httpx.Client) -> None:
        self.is_ready = False
        self._client = client
        self._ranks: dict[str, Any] = {}

    def update(self) -> None:
        """Ask the gateway. Raises `httpx.HTTPError`."""
        self.is_ready = self._client.get("/health").status_code == httpx.codes.OK
        self._ranks = msgspec.structs.asdict(decoded(self._client.get("/v1/cluster/ranks"), RankList))

    def json(self, indent: int | None = None) -> str:
        return json.dumps({"ready": self.is_ready, **self._ranks}, indent=indent)

    def tables(self) -> Group:
        ready = "[green]ready[/]" if self.is_ready else "[red]not ready: no engine can serve a request[/]"
        return Group(*rank_tables(self._ranks), ready)

    def line_or_tables(self, url: str, *, as_json: bool) -> RenderableType:
        """Ask again, and return what to show: an error if no gateway answers."""
        try:
            self.update()
        except httpx.HTTPError as error:
            self.is_ready = False
            problem = reason(url, error)
            return Text(
                json.dumps({"ready": False, "error": problem}) if as_json else problem, style="" if as_json else "red"
            )
        return Text(self.json()) if as_json else self.tables()


def run_chat(url: str, api_key: str | None, settings: ChatSettings) -> None:
    """Read lines and stream answers, until an empty line or the end of the input."""
    console = Console()
    messages = [{"role": "system", "content": settings.system}] if settings.system else []
    try:
        with gateway_client(url, api_key, ANSWER_S) as client:
            model = settings.model or decoded(client.get("/v1/models"), ModelList).data[0].id
            console.print(f"Talking to [bold]{model}[/]. An empty line ends.", highlight=False)
            while question := _read(console):
                messages.append({"role": "user", "content": question})
                body = {
                    "model": model,
                    "messages": messages,
                    "max_tokens": settings.max_tokens,
                    "temperature": settings.temperature,
                    "stream": True,
                }
                messages.append({"role": "assistant", "content": show_answer(console, _stream(client, body))})
    except httpx.HTTPError as error:
        fail(reason(url, error), code=1)


def gateway_client(url: str, api_key: str | None, timeout_s: float = STATUS_S) -> httpx.Client:
    """Return a client of a gateway, which must answer within `timeout_s`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base_url = url.rstrip("/").removesuffix("/v1")
    return httpx.Client(base_url=base_url, headers=headers, timeout=httpx.Timeout(timeout_s, connect=CONNECT_S))


def decoded(response: httpx.Response, kind: type[T]) -> T:
    """Decode a gateway's answer. Raises `httpx.HTTPError` if it is a refusal, or not the answer of a gateway."""
    try:
        return msgspec.json.decode(response.raise_for_status().content, type=kind)
    except msgspec.DecodeError:
        raise httpx.DecodingError(f"{response.url} answers, but not as Baton does: {ANOTHERS}") from None


def _read(console: Console) -> str:
    try:
        return console.input("[bold]> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def show_answer(console: Console, deltas: Iterator[dict[str, Any]]) -> str:
    """Print an answer as it comes, with its reasoning dimmed. Return the answer without the reasoning."""
    answer, thinks = "", False
    for delta in deltas:
        thought, piece = delta.get("reasoning_content") or "", delta.get("content") or ""
        console.print(thought, style="dim", end="", markup=False, highlight=False, soft_wrap=True)
        if piece and thinks and not answer:
            console.print("\n")
        thinks, answer = thinks or bool(thought), answer + piece
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
    return answer


def _stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the delta of the message in each event."""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            response.read()
        response.raise_for_status()
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if line == data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise httpx.HTTPError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"]


def reason(url: str, error: httpx.HTTPError) -> str:
    """Describe the error of a request to `url` to its user."""
    if isinstance(error, httpx.HTTPStatusError):
        if error.response.status_code == httpx.codes.UNAUTHORIZED:
            return f"{url} answers with 401: give a key that it takes as --api-key"
        try:
            return str(error.response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"{error.request.url} answers with {error.response.status_code}, not as Baton does: {ANOTHERS}"
    if isinstance(error, httpx.TransportError):
        return no_answer(url, error)
    return str(error)


def no_answer(url: str, why: object) -> str:
    """Say that no server answers, and why."""
    return f"no answer from {url} ({why}); is `baton serve` running there?"

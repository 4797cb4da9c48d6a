"""Generate the parts of docs/reference that follow from the code: `make docs`. `--check` names stale ones.

cli.md       the `baton` command: every command, argument and option
metrics.md   the metrics that processes export: names, kinds, labels
http.md      the table of routes, between two comments; the rest of the page is written by hand
settings.md  the ranges of numbers, between two comments; the rest of the page is written by hand
"""

from __future__ import annotations

import re
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import typer
from annotated_types import Ge, Gt, Le, Lt
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.routing import Route
from starlette.testclient import TestClient
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from baton.cluster.cli.eval import eval_app
from baton.cluster.cli.main import app as baton_app
from baton.cluster.contracts import ClientCounters, DirectorySnapshot
from baton.cluster.engines.engine_socket import MessageCounters
from baton.cluster.engines.metrics import LABELS, EngineMetrics
from baton.cluster.gateway.app import create_app
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.gateway.model import ServedModel
from baton.cluster.gateway.settings import GatewaySettings
from baton.cluster.membership.members import DirectoryMetrics, Membership
from baton.cluster.process_metrics import ProcessesUp
from baton.cluster.spec import FleetSpec
from baton.cluster.wire import Status
from baton.engine.core.messages import EngineStats
from baton.engine.core.speculation.stats import SpeculationStats
from baton.engine.core.tiers import TierStats
from baton.kv_transfer.protocol.stats import TransferStats

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs/reference"
MODEL = ROOT / "configs/demo/model"
SAME_AS_OTHERS = ("fleets.prefill", "fleets.decode", "fleets.*.engine")
NOTE = "<!-- `make docs` writes this page. -->"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# The command line


def cli_page() -> str:
    baton_app.add_typer(eval_app, name="eval", help="Check the answers of a running server.")
    commands = list(leaves(typer.main.get_command(baton_app), "baton"))
    shown = table(("command", ""), ((f"[`{path}`](#{anchor(path)})", summary(each)) for path, each in commands))
    opening = paragraph(
        "After this page you know every command of `baton` and its options; `baton COMMAND --help` says the same. "
        "Where a command starts an engine, each [engine argument](settings.md#engine) is an option, too: "
        "`--max-num-seqs 128`."
    )
    parts = ["# The command line", NOTE, opening, shown, *(section(path, each) for path, each in commands)]
    return "\n\n".join(parts) + "\n"


def leaves(command: object, path: str) -> Iterator[tuple[str, TyperCommand]]:
    """Yield each command without subcommands, with the words that name it."""
    if isinstance(command, TyperGroup):
        for name, each in command.commands.items():
            yield from leaves(each, f"{path} {name}")
    elif isinstance(command, TyperCommand):
        yield path, command


def anchor(heading: str) -> str:
    return heading.replace(" ", "-")


def summary(command: TyperCommand) -> str:
    return cell((command.help or "").partition("\n\n")[0])


def section(path: str, command: TyperCommand) -> str:
    """Return a command's section of the page: its help, and its parameters as a table."""
    params = [each for each in command.params if isinstance(each, TyperArgument | TyperOption) and each.name != "help"]
    rows = [(f"`{spelling(each)}`", default_of(each), cell(f"{each.help or ''} {range_of(each)}")) for each in params]
    said = [paragraph(part) for part in (command.help or "").split("\n\n")]
    return "\n\n".join([f"## {path}", *said, *([table(("", "default", ""), rows)] if rows else [])])


def paragraph(text: str) -> str:
    """Return a paragraph of help; a shell command becomes a code block."""
    if re.match(r"baton [a-z]+ ", text):
        return f"```sh\n{text}\n```"
    return "\n".join(textwrap.wrap(plain(text), 120, break_long_words=False, break_on_hyphens=False))


def spelling(param: TyperArgument | TyperOption) -> str:
    if isinstance(param, TyperArgument):
        return str(param.name).upper()
    return ", ".join([*param.opts, *param.secondary_opts])


def default_of(param: TyperArgument | TyperOption) -> str:
    """Return a parameter's default: from the code, or else from the brackets in its help."""
    said = re.search(r"\[default: ([^\]]*)\]", param.help or "")
    if said:
        return said[1]
    if param.required:
        return "required"
    silent = param.default is None or param.default is False or callable(param.default)
    return "" if silent else f"`{param.default}`"


def range_of(param: TyperArgument | TyperOption) -> str:
    """Return the least and the largest value of a number, in brackets; empty if one of them is not limited."""
    low, high = getattr(param, "min", None), getattr(param, "max", None)
    return "" if low is None or high is None else f"({shown(low)} to {shown(high)})"


def shown(number: Any) -> str:
    return f"{number:,}".removesuffix(".0").replace(",", " ")


def plain(text: str) -> str:
    """Return help without terminal markup."""
    return " ".join(re.sub(r"\s*\[default: [^\]]*\]", "", text).split())


def cell(text: str) -> str:
    return plain(text).replace("|", "\\|")


# Metrics


def metrics_page() -> str:
    registry = GatewayMetrics("model", list).registry
    directory = DirectoryMetrics(Membership(time.monotonic, 0))
    head = ("metric", "kind", "labels", "")
    return "\n\n".join(
        [
            "# Metrics",
            NOTE,
            "After this page you know the name, kind and labels of everything at `GET /metrics`, where any gateway\n"
            "answers with the metrics of all processes of its application. [What to watch](../operate/monitoring.md)\n"
            "says what to scrape, which of them matter, and when.",
            "## Of each gateway and its requests",
            "All have the label `gateway`.",
            table(head, rows(registry._collector_to_names, without=["model_name"])),
            "Histograms, and counters of tokens and finished choices, also have the label `model_name`.",
            "## Of each engine",
            "All have the labels `model_name`, `engine` and `role`.",
            table(head, rows([EngineMetrics(["", "", ""], sample_status, MessageCounters())], without=LABELS)),
            "## Of the directory",
            table(head, rows([directory])),
            "## Of the scrape",
            table(head, rows([ProcessesUp({})])) + "\n",
        ]
    )


def sample_status() -> Status:
    """Return the status of an engine that has every optional part, so that all metrics appear."""
    absent = ("num_late_compilations", "experts", "tiers", "step_times", "speculation")
    counts: dict[str, Any] = {name: 0 for name in EngineStats.__struct_fields__ if name not in absent}
    return Status(1, EngineStats(**counts, tiers=TierStats(), speculation=SpeculationStats()), TransferStats())


def rows(collectors: Iterable[Collector], without: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Return a table row for each metric family of the collectors, by name."""
    found = [
        row(family, getattr(family, "_labelnames", ()) or getattr(collector, "_labelnames", ()), without)
        for collector in collectors
        for family in collector.collect()
    ]
    return sorted(found, key=lambda cells: cells[0].strip("`"))


def row(family: Metric, labels: Iterable[str], without: Sequence[str]) -> tuple[str, ...]:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    shown = ", ".join(f"`{label}`" for label in labels if label not in without)
    return f"`{name}`", family.type, shown, cell(family.documentation)


# Routes


def http_page() -> str:
    return with_table("http.md", "routes", table(("route", "methods", "API key, where keys are set"), routes()))


def with_table(page: str, name: str, made: str) -> str:
    """Return a page of which one table is made here: what is between the comments with its name."""
    first, last = f"<!-- {name}: `make docs` -->", f"<!-- end of {name} -->"
    before, begin, rest = (REFERENCE / page).read_text().partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise SystemExit(f"docs/reference/{page} has no `{first}` ... `{last}`")
    return f"{before}{first}\n\n{made}\n\n{last}{after}"


def routes() -> Iterator[tuple[str, str, str]]:
    """Yield path, methods, and whether the route refuses requests without a key."""
    client = SimpleNamespace(engines=list, listed=lambda: DirectorySnapshot(1, [], []), counters=ClientCounters)
    settings = GatewaySettings(api_keys=["key"])
    gateway = create_app(client, ServedModel.from_folder(MODEL), settings)
    caller = TestClient(gateway, raise_server_exceptions=False)
    for route in gateway.router.routes:
        assert isinstance(route, Route)
        methods = sorted(route.methods or ())
        refused = caller.request(methods[0], route.path).status_code == 401
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        yield f"`{path}`", ", ".join(methods), "needed" if refused else "not asked for"


# Settings


def settings_page() -> str:
    return with_table("settings.md", "ranges", table(("setting", "from", "to"), ranges(FleetSpec, "")))


def ranges(model: type[BaseModel], part: str) -> Iterator[tuple[str, str, str]]:
    """Yield each number among the settings, its least and its largest value."""
    inner: dict[str, type[BaseModel]] = {}
    for name, field in model.model_fields.items():
        path = f"{part}.{name}" if part else name
        low = next((bound(each) for each in field.metadata if isinstance(each, Ge | Gt)), None)
        high = next((bound(each) for each in field.metadata if isinstance(each, Le | Lt)), None)
        if low is not None and high is not None:
            yield f"`{path}`", low, high
        elif path not in SAME_AS_OTHERS:
            for each in (field.annotation, *get_args(field.annotation)):
                if isinstance(each, type) and issubclass(each, BaseModel):
                    inner["fleets.*" if path == "fleets.unified" else path] = each
    for path, each in inner.items():
        yield from ranges(each, path)


def bound(limit: Ge | Gt | Le | Lt) -> str:
    """Return a limit as the page shows it; one that is excluded says so."""
    match limit:
        case Ge(value) | Le(value):
            return shown(value)
        case Gt(value):
            return f"above {value}"
        case Lt(value):
            return f"below {value}"
    raise TypeError(limit)


PAGES = {"settings.md": settings_page, "cli.md": cli_page, "metrics.md": metrics_page, "http.md": http_page}


def main() -> int:
    stale = {name: text for name, make in PAGES.items() if (text := make()) != read(REFERENCE / name)}
    if "--check" in sys.argv:
        for name in stale:
            print(f"docs/reference/{name} is stale: run `make docs`")
        return bool(stale)
    for name, text in stale.items():
        (REFERENCE / name).write_text(text)
        print(f"docs/reference/{name}")
    return 0


def read(page: Path) -> str:
    return page.read_text() if page.exists() else ""


if __name__ == "__main__":
    sys.exit(main())

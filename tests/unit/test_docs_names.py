"""Names in the documentation's text are those of the code: files, classes, settings, metrics, routes, options."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from baton.cluster.cli.eval import eval_app
from baton.cluster.cli.main import app as baton_app
from baton.cluster.gateway.routing.breaker import BreakerSettings
from baton.cluster.gateway.routing.rates import CostRates
from baton.cluster.gateway.settings import QueueLimits
from baton.cluster.logs import LogSettings
from baton.cluster.spec import Fleet, GatewaySpec
from baton.cluster.spec.parts import AutoscalingSpec
from baton.engine.config import EngineConfig
from baton.kv_transfer.settings import TierSettings, TransferSettings

ROOT = Path(__file__).parents[2]
CODE = ("cluster", "engine", "kernels", "kv_transfer", "tools", "tests", "configs", "helm")
LOG = ROOT / "docs/benchmarks/log.md"  # tells of code as it was
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page != LOG),
    *(ROOT / f"{name}/README.md" for name in ("kernels", "engine/models", "configs/models", "tests")),
]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"[\w/.-]*\w\.py")
CLASS = r"[A-Z][a-z]+(?:[A-Z]\w*)+"
NOT_OURS = {"TimeoutStopSec", "EveryNode"}  # of systemd, of Serve
OTHER_OPTIONS = {"--slice", "--servers", "--baton-options"}  # of our pytest, of tools/compare_servers.py
SETTINGS: Mapping[str, type[BaseModel]] = {
    "engine": EngineConfig,
    "gateway": GatewaySpec,
    "gateway.breaker": BreakerSettings,
    "gateway.cost": CostRates,
    "gateway.queue_limits": QueueLimits,
    "transfer": TransferSettings,
    "fleets.*": Fleet,
    "fleets.*.kv_tiers": TierSettings,
    "kv_tiers": TierSettings,
    "autoscaling": AutoscalingSpec,
    "logging": LogSettings,
}
ONLY_OF_THE_CHART = {"autoscaling.enabled"}


def spans(page: Path) -> list[str]:
    """Return what stands between backticks outside blocks of code, each in one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", page.read_text()))]


def drawn(page: Path) -> str:
    """Return the page's blocks without a language: pictures of the code."""
    return "\n".join(match[3] for match in FENCE.finditer(page.read_text()) if not match[2])


@functools.cache
def code_files() -> frozenset[str]:
    return frozenset(str(file.relative_to(ROOT)) for folder in CODE for file in (ROOT / folder).rglob("*.py"))


@functools.cache
def identifiers() -> Mapping[str, frozenset[str]]:
    """Return each class's name with all identifiers in it; under "" all of the code, and the names of alerts."""
    found = {"": set(re.findall(r"alert: (\w+)", (ROOT / "configs/observability/rules.yaml").read_text()))}
    for file in code_files() - {str(Path(__file__).relative_to(ROOT))}:
        source = (ROOT / file).read_text()
        found[""].update(re.findall(r"\w+", source))
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                found.setdefault(node.name, set()).update(re.findall(r"\w+", body))
    return {name: frozenset(words) for name, words in found.items()}


def options_of(command: Any) -> Iterator[str]:
    for param in command.params:
        yield from (*param.opts, *param.secondary_opts)
    for below in getattr(command, "commands", {}).values():
        yield from options_of(below)


def every_page(test: Any) -> Any:
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))(test)


@every_page
def test_files_of_code_exist(page: Path) -> None:
    """A file may be named by the end of its path only."""
    named = {span for span in spans(page) if FILE.fullmatch(span)}
    assert [name for name in sorted(named) if not any(f"/{file}".endswith(f"/{name}") for file in code_files())] == []


@every_page
def test_classes_and_their_members_exist(page: Path) -> None:
    known = identifiers()
    text = "\n".join([*spans(page), drawn(page)])
    assert sorted({*re.findall(rf"(?<![\w/.:]){CLASS}\b", text)} - known[""] - NOT_OURS) == []
    members = {(name, member) for name, member in re.findall(rf"\b({CLASS})\.([a-z_]\w+)", text) if name in known}
    assert sorted(f"{name}.{member}" for name, member in members if member not in known[name]) == []


@every_page
def test_settings_exist(page: Path) -> None:
    parts = "|".join(re.escape(part) for part in sorted(SETTINGS, key=len, reverse=True))
    named = {match.groups() for span in spans(page) if (match := re.match(rf"({parts})\.([a-z_]+)(?![\w./*])", span))}
    unknown = {
        f"{part}.{name}"
        for part, name in named
        if name not in SETTINGS[part].model_fields and not (ROOT / part / name).is_dir()  # `engine.core`
    }
    assert sorted(unknown - ONLY_OF_THE_CHART) == []


@every_page
def test_metrics_exist_with_the_labels_that_are_named(page: Path) -> None:
    """The reference page, which follows from the code, has them all."""
    rows = re.findall(r"^\| `(baton_\w+)` \|[^|]*\|([^|]*)\|", (ROOT / "docs/reference/metrics.md").read_text(), re.M)
    labels = {name: set(re.findall(r"`(\w+)`", own)) for name, own in rows}
    assert len(labels) > 50
    named = {match.groups() for span in spans(page) if (match := re.fullmatch(r"(baton_\w+?)(?:\{([^}]*)\})?", span))}
    for name, own in named - {("baton_timeline", None), ("baton_gateway", None)}:  # a request's field, a Ray resource
        assert name in labels, name
        assert set(re.findall(r"(\w+)(?:=|,|$)", re.sub(r'"[^"]*"', "", own or ""))) <= labels[name], name


@every_page
def test_routes_exist(page: Path) -> None:
    """The page of the HTTP API, whose table follows from the code, has them all."""
    known = set(re.findall(r"^\| `(/[^`]*)` \|", (ROOT / "docs/reference/http.md").read_text(), re.MULTILINE))
    assert len(known) > 20
    named = {found for span in spans(page) for found in re.findall(r"(?:^|GET |POST )(/v1/[\w/{}]+)", span)}
    named |= {found for span in spans(page) for found in re.findall(r"(?:GET|POST) (/\w[\w/{}]*)", span)}
    assert sorted(named - known - {"/v1/responses/{id}"}) == []  # OpenAI's, which Baton does not have


@every_page
def test_options_that_are_named_alone_are_of_some_command(page: Path) -> None:
    known = {option for app in (baton_app, eval_app) for option in options_of(typer.main.get_command(app))}
    known |= {f"--{prefix}{name.replace('_', '-')}" for name in EngineConfig.model_fields for prefix in ("", "no-")}
    texts = [span for span in spans(page) if span.startswith("--")]
    alone = {word for text in texts for word in re.findall(r"(?<!\S)--[a-z][\w-]*", text)}
    assert sorted(alone - known - OTHER_OPTIONS) == []


def test_wrong_names_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`waves.py`, `RankedGroup`, `EngineCore.stop_all`, `gateway.cost.rate_s`, `baton_engine{kind}`,\n"
        "`GET /rank`, `--jason`\n"
    )
    for test in (
        test_files_of_code_exist,
        test_classes_and_their_members_exist,
        test_settings_exist,
        test_metrics_exist_with_the_labels_that_are_named,
        test_routes_exist,
        test_options_that_are_named_alone_are_of_some_command,
    ):
        with pytest.raises(AssertionError):
            test(page)

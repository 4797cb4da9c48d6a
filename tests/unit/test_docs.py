"""The documentation's names exist, and the HTTP API's page lists the fields that the gateway takes."""

import ast
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from pydantic import BaseModel

from baton.cluster.gateway.api.anthropic_request import FIELDS as MESSAGES_FIELDS
from baton.cluster.gateway.api.anthropic_request import MessagesRequest
from baton.cluster.gateway.api.parsing import NOT_SUPPORTED
from baton.cluster.gateway.api.protocol import ChatRequest, CompletionRequest
from baton.cluster.gateway.api.responses_request import FIELDS as RESPONSES_FIELDS
from baton.cluster.gateway.api.responses_request import ResponsesRequest
from baton.cluster.gateway.routing.breaker import BreakerSettings
from baton.cluster.gateway.routing.rates import CostRates
from baton.cluster.gateway.settings import Change, QueueLimits, change_of
from baton.cluster.logs import LogSettings
from baton.cluster.spec import Fleet, GatewaySpec
from baton.cluster.spec.parts import AutoscalingSpec
from baton.engine.config import EngineConfig
from baton.engine.core.speculation.config import SpeculativeConfig
from baton.kv_transfer.settings import TierSettings, TransferSettings

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / f"{name}/README.md" for name in ("kernels", "engine/models", "configs/models", "tests")),
]
TREE = r"(?:cluster|engine|kernels|kv_transfer|configs|helm|tests|docs)"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(rf"`({TREE}/[\w./]+)`|(?<![/\w])(docs/[\w/]+\.md)\b", page.read_text())
    assert [name for pair in named for name in pair if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_opens_with_what_its_reader_can_do_after_it(page: Path) -> None:
    paragraphs = re.split(r"\n{2,}", page.read_text())
    opening = next(each for each in paragraphs if not each.startswith(("#", "<!--")))
    assert re.search(r"\byou\s+(can|know)\b", opening)


def test_every_page_is_on_the_first_one() -> None:
    linked = set(re.findall(r"\]\(([^)]+)\)", (ROOT / "docs/README.md").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - linked == {"README.md"}


def test_the_glossary_has_thirty_words_at_most_in_order() -> None:
    words = re.findall(r"^\| \*\*([^*]+)\*\*", (ROOT / "docs/reference/glossary.md").read_text(), re.MULTILINE)
    assert words == sorted(set(words), key=str.lower)
    assert 0 < len(words) <= 30


def defined_in(file: Path) -> set[str]:
    """Names at the top of a module, and methods as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def test_the_hops_of_the_tour_are_in_the_files_that_it_links() -> None:
    page = ROOT / "docs/start/tour.md"
    hops = re.findall(r"^\| \[[^]]+\]\(([^)]+)\) `([^`]+)` \|", page.read_text(), re.MULTILINE)
    assert len(hops) > 30
    assert [(file, name) for file, name in hops if name not in defined_in(page.parent / file)] == []


def test_the_tree_of_folders_is_the_one_on_the_disk() -> None:
    tree = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    shown: set[str] = set()
    above: list[str] = []
    for indent, name in re.findall(r"^( *)(\w+)/ ", tree, re.MULTILINE):
        above = [*above[: len(indent) // 2], name]
        shown.add("/".join(above))
    assert [folder for folder in shown if not (ROOT / folder).is_dir()] == []
    packages = (
        init.parent for part in ("cluster", "engine", "kv_transfer") for init in (ROOT / part).rglob("__init__.py")
    )
    assert {str(package.relative_to(ROOT)) for package in packages} - shown == set()


def test_contracts_are_in_the_files_that_are_named_for_them() -> None:
    table = (ROOT / "docs/architecture.md").read_text().partition("## Contracts in code")[2].partition("###")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    for _, names, files, *_ in rows:
        code = "".join((ROOT / file).read_text() for file in re.findall(r"`([\w/]+\.py)`", files))
        for name in re.findall(r"`(\w+)`", names):
            assert not code or re.search(rf"^(class|def) {name}\b", code, re.MULTILINE), name


@pytest.mark.parametrize(("page", "folder"), [("engine", "engine/core"), ("serving", "cluster/gateway/serving")])
def test_objects_are_in_the_files_that_are_named_beside_them(page: str, folder: str) -> None:
    text = (ROOT / f"docs/concepts/{page}.md").read_text().partition("| object | file |")[2]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ((?:`[\w/]+\.py`(?:, )?)+) \|", text, re.MULTILINE)
    assert len(rows) > 5
    for names, files in rows:
        defined = set(chain(*(defined_in(ROOT / folder / file) for file in re.findall(r"`(.+?)`", files))))
        assert set(re.findall(r"`(\w+)`", names)) <= defined


def test_files_of_the_runner_define_what_they_own() -> None:
    table = (ROOT / "docs/concepts/engine.md").read_text().partition("| file | owns |\n")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[1:]]
    assert len(rows) > 10
    for files, owns in rows:
        folder = ROOT / "engine/worker" / ("backends" if "backends/" in files else "")
        names = re.findall(r"`(?:backends/)?(\w+\.py)`", files)
        defined = set(chain(*(defined_in(folder / name) for name in names)))
        assert set(re.findall(r"`(\w+)`", owns)) <= defined, files


def test_the_page_of_the_http_api_names_every_field_and_no_other() -> None:
    page = " ".join((ROOT / "docs/reference/http.md").read_text().split())
    taken = set(chain(CompletionRequest.model_fields, ChatRequest.model_fields))
    fields = page.partition("## Fields")[2].partition("**Refused by name**")[0]
    named = set(re.findall(r"`([a-z_]+)`", fields))
    assert taken - named == set()
    refused = page.partition("**Refused by name**")[2].partition("**Refused as unknown**")[0]
    assert {name for name in re.findall(r"`([a-z_]+)`", refused) if "_" in name} <= {
        *NOT_SUPPORTED,
        "unsupported_parameter",
    }


def test_the_page_of_the_http_api_names_the_fields_that_converted_requests_lack() -> None:
    page = " ".join((ROOT / "docs/reference/http.md").read_text().split())
    both, messages = (
        set(re.findall(r"`([a-z_]+)`", page.partition(begin)[2].partition(".")[0]))
        for begin in ("under their API's own names, except ", "Messages also lack ")
    )
    shared = set(CompletionRequest.model_fields) & set(ChatRequest.model_fields)
    assert shared - set(ResponsesRequest.model_fields) - RESPONSES_FIELDS.renamed.keys() == both
    converted = {*MESSAGES_FIELDS.renamed, "logprobs"}  # messages have no log probabilities
    assert shared - set(MessagesRequest.model_fields) - converted == both | messages


def test_pages_that_follow_from_the_code_are_fresh() -> None:
    command = [sys.executable, ROOT / "tools/reference.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.returncode) == ("", 0)


def test_the_page_of_the_http_api_says_what_each_route_does() -> None:
    page = (ROOT / "docs/reference/http.md").read_text()
    routes, explained = page.partition("| what it does |")[::2]
    paths = set(re.findall(r"^\| `(/[^`]*)` \|", routes, re.MULTILINE))
    rows = explained.partition("\n\n")[0].splitlines()[2:]
    assert {path for row in rows for path in re.findall(r"`(/[^`]*)`", row.split("|")[1])} == paths


def settings_in(section: str) -> dict[str, str]:
    """Names and defaults of one table of the page of settings."""
    table = (ROOT / "docs/reference/settings.md").read_text().partition(f"## `{section}`\n")[2].partition("\n## ")[0]
    found: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`[^|]+) \| ([^|]*) \|", table, re.MULTILINE):
        each = [default.strip() for default in defaults.split(",")]
        for index, name in enumerate(re.findall(r"`([^`]+)`", names)):
            found[name] = each[min(index, len(each) - 1)]
    return found


def spelled(default: object) -> str:
    """As the page writes it."""
    empty = isinstance(default, BaseModel) and not default.model_fields_set  # whose parts have tables of their own
    if default is None or default == "" or (isinstance(default, list | dict) and not default) or empty:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        (default,) = default
    return f"`{default}`" if isinstance(default, str) else str(default)


def of_model(model: type[BaseModel]) -> dict[str, object]:
    return {name: field.default for name, field in model.model_fields.items()}


SETTINGS = {
    "engine": of_model(EngineConfig),
    "engine.speculative_config": of_model(SpeculativeConfig),
    "gateway": of_model(GatewaySpec)
    | {f"queue_limits.{name}": value for name, value in of_model(QueueLimits).items()}
    | {f"breaker.{name}": value for name, value in of_model(BreakerSettings).items()},
    "gateway.cost": of_model(CostRates),
    "fleets.*": of_model(Fleet),
    "fleets.*.kv_tiers": of_model(TierSettings),
    "transfer": of_model(TransferSettings),
    "autoscaling": of_model(AutoscalingSpec),
    "logging": of_model(LogSettings),
}
ONE_VALUE = {"block_size", "enable_chunked_prefill", "pipeline_parallel_size", "trust_remote_code", "disable_log_stats"}
NOT_IN_TABLES = {
    "engine": {"model", *ONE_VALUE},
    "engine.speculative_config": {"method"},  # which has no default
    "gateway": {"gateway_id", "queue_limits", "breaker", "cost"},  # which have parts
}


@pytest.mark.parametrize("section", SETTINGS)
def test_the_page_of_settings_has_each_of_them_with_its_default(section: str) -> None:
    shown = settings_in(section)
    wanted = {
        name: spelled(default)
        for name, default in SETTINGS[section].items()
        if name not in NOT_IN_TABLES.get(section, set())
    }
    shown.pop("cost", None)
    assert shown == wanted


def test_the_page_of_settings_says_what_a_change_of_each_of_gateways_takes() -> None:
    page = (ROOT / "docs/reference/settings.md").read_text()
    table = page.partition("## `gateway`\n")[2].partition("\n## ")[0]
    said = {
        name.partition(".")[0]: change
        for names, change in re.findall(r"^\| (`[^|]+) \|[^|]*\| ([^|]*) \|", table, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", names)
    }
    assert said == {
        name: change_of(GatewaySpec, name).value for name in GatewaySpec.model_fields if name != "gateway_id"
    }
    assert [kind for kind in Change if f"* **{kind}**" not in table] == [], "each is explained"


def test_arguments_that_have_one_value_are_named_beside_the_table() -> None:
    paragraphs = (ROOT / "docs/reference/settings.md").read_text().split("\n\n")
    (paragraph,) = (each for each in paragraphs if each.startswith("Taken, since"))
    assert set(re.findall(r"`(\w+)`", paragraph)) == ONE_VALUE

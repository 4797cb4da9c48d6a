"""The dashboard and the alerts query only exported metrics, and the chart installs both."""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import helm_python
import promql_parser
import pytest
import yaml
from helm_python import Chart
from prometheus_client.parser import text_string_to_metric_families

from baton.cluster.contracts import EngineRecord, EngineView, Role
from baton.cluster.engines.engine_socket import MessageCounters
from baton.cluster.engines.metrics import EngineMetrics
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.membership.members import DirectoryMetrics, Membership
from baton.cluster.process_metrics import Exporting, ProcessesUp, collect, merge
from baton.cluster.wire import Status
from baton.engine.core.messages import EngineStats
from baton.engine.core.speculation.stats import SpeculationStats
from baton.engine.core.tiers import TierStats
from baton.kv_transfer.protocol.stats import PeerLane, TransferStats

from ...helpers.charts import CHART, example, values_of

OBSERVABILITY = Path(__file__).parents[3] / "configs/observability"
DASHBOARD = json.loads((OBSERVABILITY / "grafana_dashboard.json").read_text())
RULES = yaml.safe_load((OBSERVABILITY / "rules.yaml").read_text())
SCRAPED = {"job", "namespace", "instance"}  # labels that Prometheus adds


def dashboard_queries() -> dict[str, str]:
    return {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "5m")
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
    }


ALERTS = {rule["alert"]: rule["expr"] for group in RULES["groups"] for rule in group["rules"]}
QUERIES = dashboard_queries() | ALERTS


ENGINE = EngineRecord(
    engine_id="decode-1", group_id="decode-1", epoch=1, role=Role.DECODE, rank=0, node_id="n", node_ip="10.0.0.1",
    pid=1, address="tcp://10.0.0.1:1", kv_address="tcp://10.0.0.1:2", fingerprint="f", model_id="m",
    max_model_len=1, max_num_seqs=1, max_num_batched_tokens=1, num_blocks=1,
)  # fmt: skip


LANE = PeerLane(engine_id="p", transport="nixl/UCX", bytes_per_s=1e9, is_slow=False)


def application_metrics(gateway: GatewayMetrics, tiers: TierStats, transfers: TransferStats) -> str:
    """Return the scraped text of an application with one gateway and one engine."""
    absent = ("num_late_compilations", "experts", "tiers", "step_times", "speculation")
    counts = {name: 0 for name in EngineStats.__struct_fields__ if name not in absent}
    status = Status(1, EngineStats(**counts, tiers=tiers, speculation=SpeculationStats(1, 2, 1, [1, 0])), transfers)
    engine = EngineMetrics(["m", ENGINE.engine_id, ENGINE.role], lambda: status, MessageCounters())
    directory = DirectoryMetrics(Membership(time.monotonic, 0))
    up = ProcessesUp({Exporting("engine", ENGINE.engine_id, "", "n"): []})
    own = collect(gateway.registry, {"gateway": "g"})
    return merge([own, collect(engine), collect(directory), collect(up)]).decode()


def gateway_metrics() -> GatewayMetrics:
    """Return the metrics of a gateway that reaches one engine."""
    return GatewayMetrics("m", lambda: [EngineView(ENGINE, None, outstanding=0)])


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Return the labels of every sample in a scrape, by name."""
    metrics = gateway_metrics()
    metrics.finished.labels("m", "stop").inc()
    metrics.paths.labels("unified", "least-loaded").inc()
    metrics.retries.labels("engine-gone").inc()
    metrics.rungs.labels("unified", "engine-gone").inc()
    metrics.decisions_s.labels("engine-gone").observe(0.1)
    metrics.circuit_opened(("engine",))
    metrics.stream_errors.labels("500").inc()
    metrics.responses.labels("/health", "200").inc()
    text = application_metrics(
        metrics,
        TierStats(blocks={"disk": 1}, failures={"corrupt": 1}),
        TransferStats(offers={"finished": 1}, receives={"received": 1}, lanes=[LANE]),
    )
    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    announced = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert all(any(sample.startswith(name) for sample in samples) for name in announced)
    return {name: labels for name, labels in samples.items() if not name.endswith("_created")}


def selectors(query: str) -> Iterator[promql_parser.VectorSelector]:
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(query), visit)
    assert found
    return iter(found)


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_uses_only_exported_metrics_and_labels(name: str, exported: dict[str, set[str]]) -> None:
    grouped = {
        label.strip() for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", QUERIES[name]) for label in labels.split(",")
    }
    known = set(SCRAPED)
    for selector in selectors(QUERIES[name]):
        assert selector.name in exported
        known |= exported[selector.name]
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= exported[selector.name] | SCRAPED, selector.name
    assert grouped <= known


def test_every_metric_is_in_a_panel(exported: dict[str, set[str]]) -> None:
    shown = {selector.name for query in dashboard_queries().values() for selector in selectors(query)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported}
    assert families - {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} == set()


@pytest.mark.parametrize("name", QUERIES)
def test_an_engine_is_one_series_with_any_scraped_gateway(name: str, exported: dict[str, set[str]]) -> None:
    """Each scrape may show the engine by another gateway, so `instance` changes and queries must aggregate over it."""
    aggregations: list[promql_parser.AggregateExpr] = []

    def enter(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.AggregateExpr):
            aggregations.append(node)
        elif isinstance(node, promql_parser.VectorSelector) and "engine" in exported[node.name]:
            innermost = aggregations[-1]
            assert str(innermost.op) == "max", node.name
            assert "engine" in innermost.modifier.labels, node.name

    def leave(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.AggregateExpr):
            aggregations.pop()

    promql_parser.walk(promql_parser.parse(QUERIES[name]), enter, leave)


def test_variables_of_the_dashboard_are_existing_labels(exported: dict[str, set[str]]) -> None:
    asked = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]
    assert len(asked) == 2
    for definition in asked:
        metric, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", definition).groups()  # type: ignore[union-attr]
        assert label in exported[metric] | SCRAPED


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_alerts_say_what_is_wrong() -> None:
    for group in RULES["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            named = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
            kept = re.findall(r"by \(([^)]*)\)", rule["expr"])
            assert not named or set(named) <= set(kept[0].split(", ")), rule["alert"]


@pytest.mark.parametrize("name", [name for name, expr in ALERTS.items() if "increase(" in expr or "expired" in expr])
def test_counters_in_alerts_are_exported_as_zero_before_the_first_event(name: str) -> None:
    """Prometheus computes no increase from a single value, so a series must exist before its first event."""
    text = application_metrics(gateway_metrics(), TierStats(), TransferStats())
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    for selector in selectors(ALERTS[name]):
        equal = promql_parser.MatchOp.Equal
        asked = {matcher.name: matcher.value for matcher in selector.matchers.matchers if matcher.op == equal}.items()
        of_it = [each.value for each in samples if each.name == selector.name and asked <= each.labels.items()]
        assert of_it
        assert set(of_it) == {0.0}


def test_every_alert_is_documented() -> None:
    page = (OBSERVABILITY.parents[1] / "docs/operate/monitoring.md").read_text()
    assert re.findall(r"^\| `(Baton\w+)`", page, re.MULTILINE) == list(ALERTS)


def test_every_metric_is_documented(exported: dict[str, set[str]]) -> None:
    pages = "".join(page.read_text() for page in (OBSERVABILITY.parents[1] / "docs").rglob("*.md"))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported}
    assert sorted(name for name in families if f"`{name}" not in pages) == []


def installed(chart: Path) -> dict[str, str]:
    """Render the monitoring of a chart, in a folder or in a package."""
    loaded = Chart.load(chart) if chart.is_dir() else Chart.load_archive(chart.read_bytes())
    return loaded.render(values_of("wide-ep"), name="demo", namespace="llm")


def test_a_packaged_chart_holds_the_files_that_it_links_to(tmp_path: Path) -> None:
    """The chart has links to the rules and the dashboard, which are stored only in `configs/observability`."""
    package = Path(helm_python.package(CHART, destination=tmp_path))
    with tarfile.open(package) as archive:
        for inside, name in (("rules.yaml", "rules.yaml"), ("dashboard.json", "grafana_dashboard.json")):
            assert (CHART / "files" / inside).is_symlink()
            packed = archive.getmember(f"baton/files/{inside}")
            assert packed.isreg()
            assert archive.extractfile(packed).read() == (OBSERVABILITY / name).read_bytes()
    assert installed(package) == installed(CHART)


@pytest.mark.parametrize("file", ["rules.yaml", "dashboard.json"])
def test_the_error_of_a_checkout_without_links_says_what_to_do(tmp_path: Path, file: str) -> None:
    chart = shutil.copytree(CHART, tmp_path / "baton", symlinks=False)
    assert installed(chart) == installed(CHART)
    (chart / "files" / file).write_text(os.readlink(CHART / "files" / file))  # as git does without links
    with pytest.raises(helm_python.HelmError, match=f"files/{file} is a symbolic link .* core.symlinks true"):
        installed(chart)


def test_the_chart_installs_the_dashboard_and_the_alerts() -> None:
    release = example("wide-ep")
    board = release.all("ConfigMap")["dashboard"]
    assert json.loads(board["data"]["baton.json"]) == DASHBOARD
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    (rule,) = release.all("PrometheusRule").values()
    assert rule["spec"] == RULES


@pytest.mark.parametrize("name", ["wide-ep", "external", "prefill-decode"])
def test_prometheus_scrapes_one_gateway_of_each_pod_for_the_whole_pod(name: str) -> None:
    release = example(name)
    (monitor,) = release.all("ServiceMonitor").values()
    services = release.all("Service").values()
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = (service for service in services if wanted <= service["metadata"]["labels"].items())
    assert service["spec"]["clusterIP"] == "None"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == service["spec"]["ports"][0]["name"], "this must be the port of a pod's first gateway"
    assert (endpoint["path"], endpoint["params"]) == ("/metrics", {"scope": ["node"]})


def test_objects_of_the_prometheus_operator_are_installed_only_on_request() -> None:
    kinds = {entry["kind"] for entry in example("cpu-demo").objects}
    assert kinds == {"RayService", "Service", "ServiceAccount"}

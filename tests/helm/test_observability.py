"""Dashboard and alerts ask for what gateways export, and the chart installs them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml
from charts import example
from prometheus_client.parser import text_string_to_metric_families

from baton.cluster.contracts import DirectorySnapshot, EngineRecord, EngineView, MessageCounters, Role
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.engine.core.messages import EngineStats
from baton.engine.core.tiers import TierStats
from baton.kv_transfer.protocol.stats import PeerLane, TransferStats

OBSERVABILITY = Path(__file__).parents[2] / "configs/observability"
DASHBOARD = json.loads((OBSERVABILITY / "grafana_dashboard.json").read_text())
RULES = yaml.safe_load((OBSERVABILITY / "rules.yaml").read_text())
SCRAPED = {"job", "namespace", "instance"}  # labels that Prometheus gives


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


def gateway_metrics(tiers: TierStats, transfers: TransferStats) -> GatewayMetrics:
    """Of a gateway that reaches one engine."""
    absent = ("num_late_compilations", "experts", "tiers", "step_times")
    counts = {name: 0 for name in EngineStats.__struct_fields__ if name not in absent}
    stats, mail = EngineStats(**counts, tiers=tiers), MessageCounters()
    view = EngineView(ENGINE, stats, outstanding=0, transfers=transfers, mail=mail)
    return GatewayMetrics("m", lambda: [view], lambda: DirectorySnapshot(1, [], []))


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Every sample that a gateway's /metrics has, with its labels (`le` and `quantile` apart)."""
    metrics = gateway_metrics(
        TierStats(blocks={"disk": 1}, failures={"corrupt": 1}),
        TransferStats(offers={"finished": 1}, receives={"received": 1}, lanes=[LANE]),
    )
    metrics.finished.labels("m", "stop").inc()
    metrics.paths.labels("unified", "least-loaded").inc()
    metrics.retries.labels("engine-gone").inc()
    metrics.rungs.labels("unified", "engine-gone").inc()
    metrics.decisions_s.labels("engine-gone").observe(0.1)
    metrics.circuit_opened(("engine",))
    metrics.stream_errors.labels("500").inc()
    metrics.responses.labels("/health", "200").inc()
    text = metrics.render().decode()
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
def test_a_query_asks_for_metrics_and_labels_that_are_exported(name: str, exported: dict[str, set[str]]) -> None:
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
def test_what_each_gateway_says_of_an_engine_is_counted_once(name: str, exported: dict[str, set[str]]) -> None:
    """Summed over gateways, an engine would count as often as gateways reach it."""
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


def test_variables_of_the_dashboard_are_labels_that_exist(exported: dict[str, set[str]]) -> None:
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
def test_what_has_never_happened_is_told_so_that_its_first_time_counts(name: str) -> None:
    """Prometheus knows no rate of a series that has one value: it must be there before the event."""
    text = gateway_metrics(TierStats(), TransferStats()).render().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    for selector in selectors(ALERTS[name]):
        equal = promql_parser.MatchOp.Equal
        asked = {matcher.name: matcher.value for matcher in selector.matchers.matchers if matcher.op == equal}.items()
        of_it = [each.value for each in samples if each.name == selector.name and asked <= each.labels.items()]
        assert of_it
        assert set(of_it) == {0.0}


def test_every_alert_is_explained() -> None:
    page = (OBSERVABILITY.parents[1] / "docs/operate/monitoring.md").read_text()
    assert re.findall(r"^\| `(Baton\w+)`", page, re.MULTILINE) == list(ALERTS)


def test_every_metric_is_explained(exported: dict[str, set[str]]) -> None:
    pages = "".join(page.read_text() for page in (OBSERVABILITY.parents[1] / "docs").rglob("*.md"))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported}
    assert sorted(name for name in families if f"`{name}" not in pages) == []


def test_the_chart_installs_the_dashboard_and_the_alerts() -> None:
    release = example("wide-ep")
    board = release.all("ConfigMap")["dashboard"]
    assert json.loads(board["data"]["baton.json"]) == DASHBOARD
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    (rule,) = release.all("PrometheusRule").values()
    assert rule["spec"] == RULES


@pytest.mark.parametrize("name", ["wide-ep", "external", "prefill-decode"])
def test_prometheus_is_sent_to_every_gateway(name: str) -> None:
    release = example(name)
    (monitor,) = release.all("ServiceMonitor").values()
    services = release.all("Service").values()
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = (service for service in services if wanted <= service["metadata"]["labels"].items())
    assert service["spec"]["clusterIP"] == "None"
    endpoints = monitor["spec"]["endpoints"]
    assert [endpoint["port"] for endpoint in endpoints] == [port["name"] for port in service["spec"]["ports"]]
    assert {endpoint["path"] for endpoint in endpoints} == {"/metrics"}


def test_nothing_of_the_prometheus_operator_is_installed_unasked() -> None:
    kinds = {entry["kind"] for entry in example("cpu-demo").objects}
    assert kinds == {"RayService", "Service", "ServiceAccount"}

"""The figures and the report of `baton bench serve`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from baton.cluster.cli.load.figures import MeasuredRequest, printed, quantile, summary
from baton.cluster.cli.load.options import ServeLoad
from baton.cluster.cli.load.plots import Scale, front, number
from baton.cluster.cli.load.report import NoResult, read_results, report


def answers(count: int = 20, *, slower: float = 1.0, error: str = "") -> list[MeasuredRequest]:
    """Return requests sent every 100 ms, each with five tokens; with an `error`, every tenth one fails."""
    return [
        MeasuredRequest(
            start_s=0.1 * index,
            ttft_s=0.05 * slower * (1 + index / count),
            latency_s=0.05 * slower * (1 + index / count) + 0.04 * slower,
            itl_s=[0.01 * slower] * 4,
            input_tokens=16,
            output_tokens=5,
            error=error if index % 10 == 9 else "",
        )
        for index in range(count)
    ]


def run(slower: float = 1.0, error: str = "", **options: Any) -> dict[str, Any]:
    return summary(ServeLoad(**options), "tiny", answers(slower=slower, error=error), 2.5)


def sweep(name: str = "sweep", slower: float = 1.0) -> dict[str, Any]:
    runs = [run(slower * level, max_concurrency=level) for level in (1, 2, 4)]
    return {"sweep": "max_concurrency", "label": name, "runs": runs}


def drawn(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]


def test_figures_count_only_answered_requests() -> None:
    result = run(error="503", goodput=["ttft:60"], metric_percentiles="50,99.9", metadata=["gpu=none", "model_id=x"])
    assert (result["completed"], result["failed"], result["errors"]) == (18, 2, ["503"])
    assert result["output_throughput"] == 18 * 5 / 2.5
    assert result["median_itl_ms"] == result["p99.9_itl_ms"] == pytest.approx(10.0)
    assert result["median_tpot_ms"] == pytest.approx(10.0)
    assert "p99_ttft_ms" not in result
    assert 0 < result["request_goodput"] < 18 / 2.5
    assert (result["gpu"], result["model_id"]) == ("none", "tiny")


def test_a_quantile_lies_between_its_neighbours() -> None:
    assert [quantile([1.0, 2.0, 4.0], share) for share in (0, 0.25, 0.5, 0.75, 1)] == [1.0, 1.5, 2.0, 3.0, 4.0]


def test_rates_over_time_add_up_to_the_requests_sent() -> None:
    plots = run()["plots"]
    assert sum(plots["output_tokens_per_s"]) * plots["bucket_s"] == pytest.approx(100, rel=1e-3)
    assert sum(plots["requests_per_s"]) * plots["bucket_s"] == pytest.approx(20, rel=1e-3)
    busy_s = sum(answer.latency_s for answer in answers())
    assert sum(plots["requests_in_flight"]) * plots["bucket_s"] == pytest.approx(busy_s, rel=1e-2)
    assert plots["ttft_ms"] == sorted(plots["ttft_ms"])


def test_times_of_each_request_are_saved_on_request_and_never_printed() -> None:
    assert "ttfts" not in run()
    detailed = run(save_detailed=True)
    assert len(detailed["ttfts"]) == len(detailed["itls"]) == len(detailed["start_times"]) == 20
    assert "plots" not in printed(detailed)
    assert "ttfts" not in printed(detailed)
    assert all("plots" not in each for each in printed(sweep())["runs"])


@pytest.mark.parametrize(
    "results", [[run()], [run(label="a"), run(2.0, label="b")], [sweep()], [sweep("a"), sweep("b")]]
)
def test_a_report_is_one_file_that_loads_nothing_and_runs_nothing(results: list[dict[str, Any]]) -> None:
    page = report(results)
    assert "default-src 'none'" in page
    assert not re.search(r"<script|<link|<img|@import|url\(|https?:|\bon\w+=", page)
    assert "prefers-color-scheme: dark" in page
    svgs = drawn(page)
    assert len(svgs) == (11 if "runs" in results[0] else 7)
    assert all(svg.attrib["aria-label"] for svg in svgs)
    assert not re.search(r"\b(nan|inf)\b", "".join(re.findall(r'(?:points|d|cx|cy|x|y)="([^"]*)"', page)))


def test_two_runs_are_side_by_side_with_their_difference() -> None:
    page = report([run(label="before"), run(2.0, label="after")])
    assert "<h1>before and after</h1>" in page
    row = re.search(r"<tr><td>first token, median.*?</tr>", page, flags=re.DOTALL)
    assert row is not None
    assert 'class="worse">+100.0 %' in row[0]
    assert 'class="same">+0.0 %' in page
    assert page.count('polyline class="line s1"') == 5, "each plot with lines must have one of the second run"


def test_a_sweep_has_a_pareto_front() -> None:
    page = report([sweep()])
    pareto = next(svg for svg in drawn(page) if svg.attrib["aria-label"].startswith("Pareto"))
    dots = [each for each in pareto.iter() if "dot" in each.attrib.get("class", "")]
    assert len(dots) == 3
    assert [each.text for each in pareto.iter() if each.attrib.get("class") == "note"] == ["1", "2", "4"]
    assert front([1, 2, 3, 2], [3, 2, 1, 1]) == [True, True, True, False]
    assert front([1, 1], [1, 1]) == [True, True]


def test_the_speed_of_an_answer_is_per_token_even_if_several_events_come_at_once() -> None:
    at_once = [MeasuredRequest(ttft_s=0.1, latency_s=0.14, itl_s=[0.0, 0.0, 0.0, 0.04], output_tokens=5)] * 3
    measured = summary(ServeLoad(max_concurrency=1), "tiny", at_once, 1.0)
    assert (measured["median_itl_ms"], measured["median_tpot_ms"]) == (0.0, pytest.approx(10.0))
    page = report([{"sweep": "max_concurrency", "label": "s", "runs": [measured]}])
    assert "1: 15 tokens/s in all, 100 for one" in page


def test_runs_without_an_answer_can_be_shown() -> None:
    nothing = summary(ServeLoad(), "tiny", [MeasuredRequest(error="<b>refused</b>")], 0.01)
    page = report([nothing, {"sweep": "request_rate", "label": "s", "runs": [nothing]}])
    assert "&lt;b&gt;refused&lt;/b&gt;" in page
    assert drawn(page)


def test_results_are_read_back_with_their_files_name(tmp_path: Path) -> None:
    file = tmp_path / "monday.json"
    file.write_text(json.dumps(run()))
    assert [each["label"] for each in read_results(file)] == ["monday"]
    file.write_text(json.dumps(run(), indent=2))
    assert len(read_results(file)) == 1
    file.write_text(f"{json.dumps(run())}\n{json.dumps(run() | {'label': 'noon'})}\n")
    assert [each["label"] for each in read_results(file)] == ["monday 1", "noon"]
    for text in ("[]", "{}", "x", '{"runs": [{}]}'):
        file.write_text(text)
        with pytest.raises(NoResult, match=f"{file} is not a result"):
            read_results(file)


def test_ticks_are_round_and_lie_on_the_scale() -> None:
    for scale in (Scale(0, 7), Scale(0.001, 0.0042), Scale(3, 3000, True), Scale(11, 19, True), Scale(1, 1.5, True)):
        ticks = scale.ticks()
        assert 2 <= len(ticks) <= 14
        assert all(-1e-9 <= scale.place(tick) <= 1 + 1e-9 for tick in ticks)
        assert ticks == sorted(ticks)
    assert [number(value) for value in (0.25, 3.14159, 120.4, 1234, 12500, 3e6)] == [
        *("0.25", "3.14", "120", "1,234", "12.5k", "3M")
    ]

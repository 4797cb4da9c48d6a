"""The report of `baton bench serve` in a browser: in both themes, and as wide as the window and no wider."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cluster.cli.load.figures import MeasuredRequest, summary
from baton.cluster.cli.load.options import ServeLoad
from baton.cluster.cli.main import app

from ...helpers.chromium import PROGRAM, chromium

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")


def write_sweep(file: Path) -> None:
    answers = [MeasuredRequest(0.1 * at, 0.05 + 0.001 * at, 0.2, [0.01 + 0.001 * at] * 5, 9, 6) for at in range(30)]
    runs = [summary(ServeLoad(max_concurrency=level), "tiny", answers, 4 / level) for level in (1, 2, 4)]
    file.write_text(json.dumps({"sweep": "max_concurrency", "label": None, "runs": runs}))


@pytest.mark.slow
async def test_a_browser_shows_it_in_both_themes_without_a_fault(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_sweep(tmp_path / f"{name}.json")
    files = [str(tmp_path / f"{name}.json") for name in ("first", "second")]
    written = CliRunner().invoke(app, ["bench", "report", *files, "-o", str(tmp_path / "report.html")])
    assert (written.exit_code, written.output.split()[0]) == (0, "wrote")
    grounds = []
    async with chromium(tmp_path / "chromium") as tab:
        for theme, width in (("light", 1280), ("dark", 390)):
            await tab.look(width=width, theme=theme)
            await tab.open((tmp_path / "report.html").as_uri())
            assert await tab.text("h1") == "first and second"
            assert await tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            assert await tab.evaluate("[...document.querySelectorAll('svg')].every((e) => e.clientWidth > 200)")
            sizes = await tab.evaluate(
                "[...document.querySelectorAll('svg')].map((e) => e.getScreenCTM().a"
                " * parseFloat(getComputedStyle(e.querySelector('text')).fontSize))"
            )
            assert min(sizes) > 9, "texts of plots can be read"
            assert max(sizes) < 16
            assert await tab.evaluate("document.querySelector('td:nth-child(2)').getBoundingClientRect().right") < width
            grounds.append(await tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert tab.faults == []
    assert grounds[0] != grounds[1]

"""Short loads show no progress bar; longer ones do."""

from __future__ import annotations

import pytest

from baton.engine import weights
from baton.engine.weights import loading_bar


def test_a_short_load_shows_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with loading_bar() as report:
        report(1, 2)
        report(2, 2)
    assert capsys.readouterr() == ("", "")


def test_a_long_load_shows_a_bar_on_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PATIENCE_S", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with loading_bar("Loading weights") as report:
        report(1_000_000, 2_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Loading weights" in err


def test_a_failed_load_removes_its_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PATIENCE_S", -1.0)

    def failing_load() -> None:
        with loading_bar() as report:
            report(1, 2)
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        failing_load()
    with loading_bar() as report:  # a second bar would fail if the first were still active
        report(1, 2)

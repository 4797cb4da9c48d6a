"""Tests that need something this machine lacks are skipped with a reason; in continuous integration they fail."""

from __future__ import annotations

import pytest

from . import hosts


def test_continuous_integration_fails_where_it_cannot_make_hosts(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(hosts, "missing_here", lambda: "nobody may make a network")
    monkeypatch.setenv("CI", "true")
    with pytest.raises((pytest.fail.Exception, pytest.skip.Exception), match="nobody may make a network") as told:
        request.getfixturevalue("machine_with_hosts")
    assert told.type is pytest.fail.Exception

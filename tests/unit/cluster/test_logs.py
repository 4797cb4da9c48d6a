"""Log lines: their fields, their destination, and the escaping of control characters."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest

from baton.cluster import logs
from baton.cluster.logs import LogFormat, LogLevel, LogSettings, configure
from baton.cluster.spec import InvalidSpec, load_spec

from ...helpers.kept_logging import kept_logging

logger = logging.getLogger("baton.cluster.here")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore the logging configuration after each test."""
    with kept_logging():
        yield


def test_a_line_has_time_level_process_and_request(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogSettings(), "gateway", "gateway-1")
    logger.info("it is %d", 1)
    logs.request_id.set("chat-17")
    logger.warning("it is %d", 2)
    first, second = capsys.readouterr().err.splitlines()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.]\d{3}Z"
    assert re.fullmatch(f"{time} INFO gateway-1 it is 1", first)
    assert re.fullmatch(rf"{time} WARNING gateway-1 \[chat-17\] it is 2", second)


def test_a_json_line_has_the_same_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogSettings(format=LogFormat.JSON), "gateway", "gateway-1")
    logs.request_id.set("chat-17")
    try:
        raise ValueError("no such thing")
    except ValueError:
        logger.exception("it failed:\n%s", "\x1b[31m \ud800")
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert told.pop("time").endswith("Z")
    assert told.pop("exception").endswith("ValueError: no such thing")
    assert told == {
        "level": "error",
        "component": "gateway",
        "name": "gateway-1",
        "request_id": "chat-17",
        "logger": "baton.cluster.here",
        "message": "it failed:\n\x1b[31m \\ud800",
    }


def test_quoted_text_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogSettings(), "gateway", "gateway-1")
    logger.info("of a client: %s", "a\n2026-01-01T00:00:00.000Z ERROR gateway-1 forged \x1b[2J\u2028\x00")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("of a client: a\\n2026-01-01T00:00:00.000Z ERROR gateway-1 forged \\x1b[2J\\u2028\\x00")


def test_messages_below_the_level_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogSettings(level=LogLevel.WARNING), "gateway", "gateway-1")
    logger.info("nothing")
    logger.warning("something")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("something")


def test_a_second_call_replaces_the_first_and_leaves_handlers_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    others = logging.NullHandler()
    logging.getLogger("baton").addHandler(others)
    configure(LogSettings(), "gateway", "gateway-1")
    configure(LogSettings(format=LogFormat.JSON), "gateway", "gateway-2")
    logger.warning("once")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["name"] == "gateway-2"
    assert others in logging.getLogger("baton").handlers


def serves_handler(file: Path) -> MemoryHandler:
    """Return a handler like the one that Serve gives to its replicas."""
    target = logging.FileHandler(file)
    target.setFormatter(logging.Formatter("theirs %(message)s"))
    return MemoryHandler(1, target=target)


def test_lines_of_a_replica_are_in_the_same_file_as_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve = logging.getLogger(logs.SERVE)
    kept = serve.handlers[:]
    try:
        for name in ("first.log", "second.log"):  # Serve makes a new handler when its logging settings change
            serve.handlers[:] = [serves_handler(tmp_path / name)]
            configure(LogSettings(), "gateway", "gateway-1")
            configure(LogSettings(), "gateway", "gateway-2")
            logger.warning("ours")
            serve.error("theirs")
            ours, theirs = (tmp_path / name).read_text().splitlines()
            assert ours.endswith("WARNING gateway-2 ours")
            assert theirs == "theirs theirs"
    finally:
        serve.handlers[:] = kept
    assert capsys.readouterr().err == ""


def test_the_logging_settings_are_checked_with_the_application() -> None:
    args = {"model": "configs/demo/model", "fleets": {"unified": {}}}
    assert (load_spec(args).logging.format, load_spec(args).logging.level) == (LogFormat.TEXT, LogLevel.INFO)
    assert load_spec({**args, "logging": {"format": "json", "level": "debug"}}).logging.level is LogLevel.DEBUG
    for wrong in ({"format": "xml"}, {"level": "loud"}, {"colour": True}):
        with pytest.raises(InvalidSpec, match="logging"):
            load_spec({**args, "logging": wrong})


def test_importing_the_library_adds_no_log_handlers() -> None:
    code = "import logging, baton.cluster.logs, baton.engine; assert not logging.getLogger('baton').handlers"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

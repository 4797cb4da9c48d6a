"""Engines on one GPU tell each other how long their prompts take, in a file."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.startup import device_board
from baton.engine.startup.device_board import NUM_PLACES, STALE_S, FileBoard

ANOTHER = """
import sys
from pathlib import Path
from baton.engine.startup.device_board import FileBoard
board = FileBoard(Path(sys.argv[1]))
board.publish(1.5)
print(board.others_backlog_s(), flush=True)
sys.stdin.readline()
"""


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_each_hears_of_the_others_and_not_of_itself(tmp_path: Path, clock: Clock) -> None:
    first, second, third = (FileBoard(tmp_path / "board", clock) for _ in range(3))
    first.publish(0.5)
    second.publish(2.0)
    assert [board.others_backlog_s() for board in (first, second, third)] == [2.0, 0.5, 2.0]
    second.publish(0.0)
    assert [board.others_backlog_s() for board in (first, second, third)] == [0.0, 0.5, 0.5]
    first.close()
    assert third.others_backlog_s() == 0.0


def test_what_an_engine_said_long_ago_is_not_believed(tmp_path: Path, clock: Clock) -> None:
    dead, alive = FileBoard(tmp_path / "board", clock), FileBoard(tmp_path / "board", clock)
    dead.publish(9.0)
    clock.now_s += STALE_S - 0.01
    assert alive.others_backlog_s() == 9.0
    clock.now_s += 0.02
    assert alive.others_backlog_s() == 0.0


def test_places_of_the_dead_are_taken_and_an_engine_that_lost_its_place_takes_another(
    tmp_path: Path, clock: Clock
) -> None:
    boards = [FileBoard(tmp_path / "board", clock) for _ in range(NUM_PLACES + 1)]
    for seconds, board in enumerate(boards, start=1):
        board.publish(float(seconds))
    reader = FileBoard(tmp_path / "board", clock)
    assert reader.others_backlog_s() == NUM_PLACES, "the last one found no place"
    clock.now_s += STALE_S + 0.01
    boards[-1].publish(3.0)
    assert reader.others_backlog_s() == 3.0
    boards[0].publish(4.0)  # whose place that is now
    assert (boards[-1].others_backlog_s(), boards[0].others_backlog_s()) == (4.0, 3.0)


def test_an_engine_of_another_process_is_heard(tmp_path: Path) -> None:
    board = FileBoard(tmp_path / "board")
    board.publish(0.25)
    words = [sys.executable, "-c", ANOTHER, str(tmp_path / "board")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "0.25\n"
        assert board.others_backlog_s() == 1.5
        other.stdin.close()


def test_the_file_is_this_users_and_named_after_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_board, "FOLDER", tmp_path)
    board = device_board.board_of("GPU-1/../2")
    assert board is not None
    (file,) = tmp_path.iterdir()
    assert file.name.endswith("-GPU-12")
    assert file.stat().st_mode & 0o777 == 0o600
    board.close()
    monkeypatch.setattr(device_board, "FOLDER", tmp_path / "none")
    caplog.set_level(logging.INFO)
    assert device_board.board_of("GPU-1") is None
    assert "do not yield" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_board, "FOLDER", tmp_path)
    board = device_board.board_of("GPU-1")
    assert board is not None
    (file,) = tmp_path.iterdir()
    os.chown(file, 12345, -1)
    assert device_board.board_of("GPU-1") is None
    board.close()

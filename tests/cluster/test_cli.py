"""The command line, as far as it goes without a server."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from free_ports import free_port
from served import BATON

from baton.cluster.cli.local import gist

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def model() -> Path:
    return Path(__file__).parents[2] / "configs/demo/model"


def baton(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BATON, *words], capture_output=True, text=True, timeout=50, env={**os.environ, "COLUMNS": "200", **environment}
    )


def test_help_names_every_command() -> None:
    done = baton("--help")
    assert done.returncode == 0
    for command in ("serve", "chat", "check", "drain", "plan", "status", "bench", "eval"):
        assert command in done.stdout


def test_help_of_serve_tells_how_to_start() -> None:
    assert "baton serve configs/demo/model --prefill 1 --decode 1" in baton("serve", "--help").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prefill", "1"), "prefill engines need decode engines"),
        (("--tp", "0"), "tensor_parallel_size"),
        (("--tp", "3"), "num_attention_heads (4)"),
        (("--ep",), "has no experts"),
        (("--max-num-seq", "4"), "did you mean 'max_num_seqs'?"),
        (("stray",), "unexpected argument 'stray'"),
    ],
)
def test_serve_refuses_what_cannot_work(model: Path, words: tuple[str, ...], said: str) -> None:
    done = baton("serve", str(model), *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_serve_refuses_a_port_in_use(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = baton("serve", str(model), "--port", str(port))
    assert done.returncode == 1
    assert f"port {port}" in done.stdout
    assert "--port" in done.stdout


def test_unknown_environment_variables_are_an_error() -> None:
    done = baton("status", BATON_PORT="1")
    assert done.returncode == 2
    assert "BATON_PORT" in done.stderr


def test_status_and_chat_say_when_nobody_answers() -> None:
    for command in ("status", "chat"):
        done = baton(command, "--url", f"http://127.0.0.1:{free_port()}")
        assert done.returncode == 1
        assert "no answer from" in done.stdout


def test_check_judges_every_file(model: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump({"model": str(model), "fleets": {"unified": {}}}))
    bad.write_text(yaml.safe_dump({"model": str(model), "fleets": {"decode": {}}}))
    assert baton("check", str(good)).returncode == 0
    done = baton("check", str(good), str(bad))
    assert done.returncode == 1
    assert "is fine" in done.stdout
    assert "decode engines need prefill engines" in done.stderr


def test_of_a_traceback_the_last_error_is_shown() -> None:
    message = (
        "The replica failed:\nTraceback (most recent call last):\n  File x\nbaton.WeightsError: no files;\ngive some"
    )
    assert gist(message) == "baton.WeightsError: no files;\ngive some"
    assert gist("waiting for resources") == "waiting for resources"

"""The `baton` command, called in this process: a new interpreter would spend a second of CPU time on imports."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from baton.cluster.cli.main import main

from .kept_logging import kept_logging


def run_baton(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that starts no processes and ends by itself, and return its exit code and output.

    The output goes into a pipe, but the command sees a terminal with 200 columns.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    with kept_logging(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["baton", *words])
        for name, value in {"COLUMNS": "200", **environment}.items():
            patch.setenv(name, value)
        with (
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
            pytest.raises(SystemExit) as ended,
        ):
            main()
    code = ended.value.code or 0
    assert isinstance(code, int), code
    return subprocess.CompletedProcess(["baton", *words], code, stdout.getvalue(), stderr.getvalue())

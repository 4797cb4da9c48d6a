"""The kernel library can be imported anywhere: no Triton, no compiler, no GPU, and nothing is built by an import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "kernels"
OPS = sorted(f"baton.kernels.{init.parent.name}" for init in KERNELS.glob("*/__init__.py"))

# Importing Triton and starting programs fail, as on a machine with neither Triton nor a compiler.
SCRIPT = """
import importlib, subprocess, sys
sys.modules["triton"] = None
import torch
def refuse(*args, **kwargs):
    raise AssertionError(f"an import started {args}")
subprocess.Popen.__init__ = refuse
for name in sys.argv[1:]:
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
"""


def test_the_package_itself_loads_nothing_heavy() -> None:
    script = "import sys, baton.kernels; print({'torch', 'triton', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


@pytest.mark.slow
def test_every_op_can_be_imported_without_triton_a_compiler_or_a_gpu(tmp_path: Path) -> None:
    assert "baton.kernels.attention" in OPS
    bare = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", SCRIPT, "baton.kernels", *OPS]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").exists(), "an import built something"

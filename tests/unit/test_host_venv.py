"""`make test-gpu OFFLINE=1`: an environment of the packages that a host's Python finds already."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/host_venv.py"


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_it_finds_this_checkout_and_the_hosts_packages_and_installs_nothing(tmp_path: Path) -> None:
    made = run(sys.executable, TOOL, tmp_path / "venv")
    assert made.returncode == 0, made.stderr
    asked = """
import importlib.metadata, baton.kernels, msgspec
print(baton.kernels.__file__, msgspec.__file__, importlib.metadata.distribution("baton").locate_file(""))
"""
    ours, theirs, metadata = run(tmp_path / "venv/bin/python", "-P", "-c", asked).stdout.split()
    assert Path(metadata).is_relative_to(tmp_path), "a host has no Baton of its own"
    assert Path(ours).resolve() == ROOT / "kernels/__init__.py"
    assert not Path(theirs).is_relative_to(tmp_path)
    (command,) = (tmp_path / "venv/bin").glob("baton")
    assert command.read_text().startswith(f"#!{tmp_path}/venv/bin/python\n")
    assert run(sys.executable, TOOL, tmp_path / "venv").returncode == 0, "it may be made again"


def test_an_environment_with_packages_of_its_own_is_left_alone(tmp_path: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (tmp_path / "lib" / version / "site-packages/torch").mkdir(parents=True)
    refused = run(sys.executable, TOOL, tmp_path)
    assert refused.returncode == 1
    assert "has packages of its own" in refused.stderr
    assert not (tmp_path / "bin").exists()

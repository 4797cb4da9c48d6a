"""What is compiled ahead in other processes is what a launch asks for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

# A device that compiles for an H200 and launches nothing: this test is about what lies in the cache.
SCRIPT = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget

class Device:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_active_torch_device(self): return torch.device("cpu")

triton.runtime.driver.set_active(Device())
from pathlib import Path
from baton.kernels.compiler import Compiler, recording
from baton.kernels.step import gpu

def launch():
    memory, values = torch.zeros(64, dtype=torch.int32), torch.ones(64, dtype=torch.int32)
    gpu.apply_writes(memory, torch.zeros(1, 3, dtype=torch.int64), values)
    assert torch.empty(4).tolist() == [0] * 4 or not inside
    return memory

def cached():
    return sorted(path.name for path in Path(sys.argv[1]).rglob("*") if path.is_file())

compiler = Compiler()
inside = True
with recording() as variants:
    launch()
    assert not launch().any()
inside = False
assert len(variants) == 1, variants
assert cached() == []
compiler.compile(variants)
compiler.close()
compiled = cached()
assert any(name.endswith(".cubin") for name in compiled), compiled
gpu._apply_writes.preload(variants[0].specialization)  # compiles as a launch does
assert cached() == compiled, set(cached()) - set(compiled)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a device does not go with a real one")
def test_a_recorded_launch_finds_what_was_compiled_for_it(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr


def test_processes_that_end_early_are_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from baton.kernels.compiler import Compiler, Variant

    class Device:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(type(driver), "active", Device())
    compiler = Compiler()
    compiler.close()
    compiler.compile([Variant("no.such.module", "{}")])
    compiler.close()
    assert "one after another" in caplog.text

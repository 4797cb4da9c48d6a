"""What is rehearsed before ready is all that a step launches: a kernel that came later would compile then.

Launches are noted and skipped, so this runs anywhere. Options of kernels are the untuned ones here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint

pytest.importorskip("triton")

SCRIPT = """
import random
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

from baton.engine import build
from baton.engine.layers import linear
from baton.engine.model_config import ModelConfig
from baton.engine.models import load_model
from baton.engine.worker.cuda.queue import InlineQueue
from baton.engine.worker.cuda.rehearsal import eager_shapes, idle_steps
from baton.engine.worker.cuda.runner import DeviceRunner
from baton.engine.worker.cuda.shapes import CapturedShapes, StepShape
from baton.kernels.compiler import recording
from baton.kernels.linear.packed import PackedWeight

linear.pack = lambda weight: PackedWeight(weight, tuple(weight.shape), in_panels=False)
config = ModelConfig.from_folder(sys.argv[1], dtype="bfloat16")
layout = build._layout_of(config)
limits = {"max_num_seqs": 40, "max_num_batched_tokens": 1024, "max_model_len": 2048}
sizes = CapturedShapes(**limits, max_tokens=128)

rng = random.Random(3)
def any_step():
    seqs = rng.choice([1, 2, 3, 7, 16, 33, 40])
    tokens = rng.randint(129, 1024)
    decodes = rng.randint(0, seqs - 1)
    longest = rng.randint(-(-(tokens - decodes) // (seqs - decodes)), tokens - decodes)
    return StepShape(seqs, tokens, decodes, longest, 2048, rng.choice([tokens, 5000, 100_000]), rng.random() < 0.3)

def mm(a, b, out_dtype=None, *, out=None, mm=torch.mm):
    product = mm(a, b, out=out)
    return product if out_dtype is None else product.to(out_dtype)

torch.mm = mm  # another type for the result is there on a GPU only
model = load_model(config)
torch.Tensor.is_cuda, torch.Tensor.is_cpu = True, False  # of every tensor: kernels for a GPU are chosen
kv = torch.zeros(layout.shape(1), dtype=torch.bfloat16)
runner = DeviceRunner(
    model, kv, InlineQueue(), vocab_size=config.vocab_size, logits_dtype=torch.bfloat16, shapes=sizes, **limits
)
with recording() as variants:
    idle_steps(runner, [*sizes.largest_first(), *eager_shapes(**limits, largest_captured=128)])
    rehearsed = len(variants)
    idle_steps(runner, [any_step() for _ in range(40)])
assert rehearsed > 10, variants
assert not variants[rehearsed:], variants[rehearsed:]
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a device does not go with a real one")
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v2"])
def test_no_step_launches_what_was_not_rehearsed(kind: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    folder = write_checkpoint(tmp_path / "model", kind)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]

"""A launch finds the kernels that other processes have compiled ahead of time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.kernels.compiler import Compiler, RecordedVariants, Variant

from ... import ROOT
from ...helpers.checkpoints import write_checkpoint

pytest.importorskip("triton")

# The fake device compiles for an H200 and launches nothing, as these tests check the contents of the cache only.
AHEAD = """
import logging
import sys
import torch
import triton
from pathlib import Path
from triton.backends.compiler import GPUTarget

logging.basicConfig(level=logging.INFO)
launched = []

class Utils:
    def load_binary(self, *_): return 1, 1, 0, 0, 1024
    def get_device_properties(self, _): return {"max_shared_mem": 232_448}

class Device:
    utils = Utils()
    def launcher_cls(self, source, _): return lambda *_: launched.append(source.name)
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_active_torch_device(self): return torch.device("cpu")

triton.runtime.driver.set_active(Device())

from tests.unit.kernels.argument_kinds import launch_every_kind
from baton.kernels import jit
from baton.kernels.attention import AttentionBatch, AttentionRule
from baton.kernels.attention.gpu import decode_fp8_hopper
from baton.kernels.compiler import Compiler, Variant, recording
from baton.kernels.activation import Activation, gpu as activation
from baton.kernels.step import gpu as step

def attend():
    # by a kernel in Gluon, which takes a descriptor with a layout
    kv, scale = torch.zeros(6, 2, 1, 2, 16, 128).to(torch.float8_e4m3fn), torch.ones(1)
    batch = AttentionBatch.plan([1] * 5, [16] * 5, torch.ones(5, 1, dtype=torch.int32), 16)
    plan = decode_fp8_hopper.plan_tma_decode(batch, kv, 8)
    q = torch.zeros(5, 8, 128, dtype=torch.bfloat16)
    rule = AttentionRule(1.0, k_scale=scale, v_scale=scale)
    decode_fp8_hopper.tma_decode(q, kv, 0, batch, plan, rule, out=q)

def launch():
    memory, values = torch.zeros(64, dtype=torch.int32), torch.ones(64, dtype=torch.int32)
    step.apply_writes(memory, torch.zeros(1, 3, dtype=torch.int64), values, values)
    activation.activation_and_mul(torch.zeros(2, 64), Activation.SILU)
    launch_every_kind()
    attend()
    return memory

def cached():
    return sorted(path.name for path in Path(sys.argv[1]).rglob("*") if path.is_file())

compiler = Compiler()
submitted = []
with recording(submitted.append) as variants:
    launch()
    assert torch.empty(4).tolist() == [0] * 4
    assert not launch().any()
assert len(variants) == 5, variants
assert submitted == variants
assert cached() == launched == []
compiler.wait()
assert cached() == [], "nothing was submitted"
compiler.submit(Variant("no.such.module", "{}"))
compiler.wait()
for variant in variants:
    compiler.submit(variant)
compiler.wait()
compiler.close()
compiler.close()
compiled = cached()
assert len([name for name in compiled if name.endswith(".cubin")]) == 5, compiled
jit.mark_starting()
launch()
jit.mark_ready()
assert launched == ["_apply_writes", "activation_and_mul_kernel", "_every_kind", "write_shares", "attend_share"]
assert cached() == compiled, set(cached()) - set(compiled)
assert jit.compilations() == 5
jit.mark_starting()
launch_every_kind(flag=False)
jit.mark_ready()
"""


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a process that does not interpret kernels, and that can import those of the tests."""
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **environment}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the fake device does not work beside a real one")
def test_a_recorded_launch_finds_its_compiled_kernel_and_compiles_nothing_itself(tmp_path: Path) -> None:
    log = run(AHEAD, str(tmp_path), TRITON_CACHE_DIR=str(tmp_path)).stderr
    assert log.count("a kernel of no.such.module was not compiled ahead: ModuleNotFoundError") == 1, log
    assert log.count("was not compiled ahead") == 1, log
    of_starts = [line.rpartition("itself made ")[2] for line in log.splitlines() if "itself made" in line]
    assert of_starts == ["0 kernels and launchers: none", "1 kernels and launchers: _every_kind"], log


KEYS = """
from triton.runtime.jit import DependenciesFinder, JITCallable
from baton.kernels import compile_server, pdl
from baton.kernels.rms_norm.gpu import rms_norm_kernel as one
from baton.kernels.activation.gpu import activation_and_mul_kernel as other

def ask_before_it_has_looked(finder, callee):  # as Triton 3.6 does
    finder.used_global_vals.update(callee.used_global_vals)
    finder.hasher.update(callee.cache_key.encode())

def keys(*kernels):
    for function in (*kernels, *(value for value in vars(pdl).values() if isinstance(value, JITCallable))):
        function.hash, function.used_global_vals = None, {}
    return {kernel: kernel.cache_key for kernel in kernels}

DependenciesFinder._update_hash = ask_before_it_has_looked
assert keys(one, other) != keys(other, one), "the cache keys must depend on the order here, or the test shows nothing"
compile_server.settle_cache_keys()
assert keys(one, other) == keys(other, one)
"""


@pytest.mark.slow
def test_the_cache_key_of_a_kernel_does_not_depend_on_which_others_were_compiled_before() -> None:
    run(KEYS)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's driver report an H200."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Device:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(type(driver), "active", Device())


@pytest.fixture
def compiler(h200: None) -> Iterator[Compiler]:
    made = Compiler()
    yield made
    made.close()


def test_kernels_are_compiled_although_the_compile_server_has_ended(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.process.kill()
    for _ in range(2):
        compiler.submit(Variant("no.such.module", "{}"))
        compiler.wait()
    assert caplog.text.count("1 kernels are compiled one after another") == 2


@pytest.mark.slow
def test_the_compile_processes_end_with_the_one_that_started_them(compiler: Compiler) -> None:
    """The compile server and its workers end at the end of their input, however this process ends."""
    compiler.submit(Variant("no.such.module", "{}"))
    compiler.wait()
    others = [*descendants(compiler.process.pid), compiler.process.pid]
    assert len(others) > 1
    compiler.close()
    compiler.process.wait(timeout=30)
    assert not [pid for pid in others if Path(f"/proc/{pid}").exists()]


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [other for child in children for other in (child, *descendants(child))]


def test_variants_can_be_submitted_before_the_processes_are_ready(compiler: Compiler) -> None:
    """The pipe holds hundreds of variants, so that recording is not delayed."""
    variant = Variant("no.such.module", json.dumps({"name": "x" * 3000}))
    compiler.process.send_signal(signal.SIGSTOP)
    submitting = threading.Thread(target=lambda: [compiler.submit(variant) for _ in range(200)], daemon=True)
    submitting.start()
    submitting.join(timeout=20)
    stuck = submitting.is_alive()
    compiler.process.send_signal(signal.SIGCONT)
    assert not stuck


VARIANTS = [Variant("some.module", '{"name": "one"}'), Variant("some.module", '{"name": "two"}')]


@pytest.fixture
def code(h200: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code, and an empty cache of Triton's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "code" / "deep"
    folder.mkdir(parents=True)
    (folder / "launches.py").write_text("one()\ntwo()\n")
    (folder / "tuned.json").write_text("{}")
    return folder.parent


def test_recorded_variants_are_found_again_for_the_same_facts_and_code(code: Path) -> None:
    recorded = RecordedVariants([1, "a"], [code])
    assert recorded.load() is None
    recorded.save(VARIANTS)
    assert RecordedVariants([1, "a"], [code]).load() == VARIANTS
    assert RecordedVariants([1, "b"], [code]).load() is None
    (code / "deep/notes.txt").write_text("no code")
    assert RecordedVariants([1, "a"], [code]).load() == VARIANTS
    for file in ("deep/launches.py", "deep/tuned.json"):
        before = RecordedVariants([1, "a"], [code]).path
        (code / file).write_text('{"another": "text"}')
        assert RecordedVariants([1, "a"], [code]).path != before, file


def test_variants_that_were_removed_are_recorded_again(code: Path) -> None:
    recorded = RecordedVariants([], [code])
    recorded.save(VARIANTS)
    recorded.remove()
    assert recorded.load() is None
    recorded.remove()


@pytest.mark.parametrize("text", ["", "{", '"text"', "[[1, 2, 3]]", "[1]"])
def test_a_damaged_file_of_variants_is_named_and_ignored(
    code: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    recorded = RecordedVariants([], [code])
    recorded.save(VARIANTS)
    recorded.path.write_text(text)
    assert recorded.load() is None
    assert f"{recorded.path} is ignored" in caplog.text


def test_variants_that_cannot_be_saved_are_recorded_again(code: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorded = RecordedVariants([], [code])
    recorded.path.parent.parent.mkdir()
    recorded.path.parent.write_text("a file where the folder should be")
    recorded.save(VARIANTS)
    assert "the next start records its kernels again" in caplog.text


FACTS = """
import sys
from pathlib import Path
from baton.engine.config import EngineConfig
from baton.engine.startup.arenas import engine_caches
from baton.engine.startup.model_config import read_model_config

for model in sys.argv[1:]:
    config = EngineConfig.from_args({"model": model, "load_format": "dummy"})
    model_config = read_model_config(config)
    print(repr([config, model_config, engine_caches(model_config).layout]))
"""


def test_the_facts_of_an_engine_have_the_same_text_in_every_process(tmp_path: Path) -> None:
    """Else each start would record its kernels again, and nobody would notice."""
    models = []
    for architecture in ("qwen3_next", "gpt_oss", "deepseek_v3"):
        models.append(str(write_checkpoint(tmp_path / architecture, architecture)))
    texts = [run(FACTS, *models, PYTHONHASHSEED=seed).stdout for seed in ("1", "2")]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == len(models)
    assert " at 0x" not in texts[0]

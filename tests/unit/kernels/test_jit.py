"""Compilations are counted, and those after the engine is ready are reported by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from baton.kernels.jit import CompilationWatch

knobs = pytest.importorskip("triton").knobs


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> CompilationWatch:
    """A watch that has just started, the only one in this process."""
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    monkeypatch.setattr(knobs.cache, "manager_class", None)
    watch = CompilationWatch()
    watch.mark_starting()
    return watch


def compile(name: str) -> None:
    """Call Triton's hook as after the compilation of a kernel of this name."""
    knobs.runtime.jit_post_compile_hook(key="key", repr=name, fn=None, compile={})


def test_compilations_are_counted(watch: CompilationWatch) -> None:
    compile("one")
    compile("two")
    assert (watch.compilations(), watch.compilations_after_ready()) == (2, 0)


def test_a_compilation_after_ready_is_counted_and_named(
    watch: CompilationWatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile("early")
    watch.mark_ready()
    with caplog.at_level(logging.WARNING):
        compile("late[num_warps=4](x: *bf16)")
    assert (watch.compilations(), watch.compilations_after_ready()) == (2, 1)
    assert "late[num_warps=4](x: *bf16)" in caplog.text
    assert "early" not in caplog.text


def test_a_further_engine_may_compile_while_it_starts_and_late_ones_stay_counted(watch: CompilationWatch) -> None:
    watch.mark_ready()
    compile("late")
    watch.mark_starting()
    compile("of the second engine")
    watch.mark_ready()
    assert (watch.compilations(), watch.compilations_after_ready()) == (2, 1)
    compile("late again")
    assert watch.compilations_after_ready() == 2


def test_watching_twice_counts_once_and_keeps_the_previous_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(knobs.cache, "manager_class", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **event: seen.append(event["repr"]))
    watch = CompilationWatch()
    watch.mark_starting()
    watch.mark_starting()
    compile("kernel")
    assert (watch.compilations(), seen) == (1, ["kernel"])


@pytest.mark.gpu
def test_a_launch_that_needs_a_new_variant_is_a_compilation(watch: CompilationWatch) -> None:
    from .spilling_kernel import hold_everything

    x = torch.randn(512, device="cuda")
    launch: Any = hold_everything[(1,)]
    for size in (256, 256, 512):
        launch(x, torch.empty_like(x), SIZE=size)
    assert watch.compilations() == 2

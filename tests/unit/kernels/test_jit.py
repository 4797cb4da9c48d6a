"""What Triton compiles is counted, and what it compiles too late is named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from baton.kernels import jit

knobs = pytest.importorskip("triton").knobs


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Tells whoever watches that Triton has compiled a kernel of this name."""
    monkeypatch.setattr(jit, "_counter", jit._Counter())
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    monkeypatch.setattr(knobs.cache, "manager_class", None)
    jit._watch.cache_clear()
    jit.mark_starting()
    yield lambda name: knobs.runtime.jit_post_compile_hook(key="key", repr=name, fn=None, compile={})
    jit._watch.cache_clear()


def test_compilations_are_counted(compiled: Callable[[str], None]) -> None:
    compiled("one")
    compiled("two")
    assert (jit.compilations(), jit.compilations_after_ready()) == (2, 0)


def test_a_compilation_after_ready_is_counted_and_named(
    compiled: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    compiled("early")
    jit.mark_ready()
    with caplog.at_level(logging.WARNING):
        compiled("late[num_warps=4](x: *bf16)")
    assert (jit.compilations(), jit.compilations_after_ready()) == (2, 1)
    assert "late[num_warps=4](x: *bf16)" in caplog.text
    assert "early" not in caplog.text


def test_a_further_engine_may_compile_while_it_starts_and_late_ones_stay_counted(
    compiled: Callable[[str], None],
) -> None:
    jit.mark_ready()
    compiled("late")
    jit.mark_starting()
    compiled("of the second engine")
    jit.mark_ready()
    assert (jit.compilations(), jit.compilations_after_ready()) == (2, 1)
    compiled("late again")
    assert jit.compilations_after_ready() == 2


def test_watching_twice_counts_once_and_keeps_the_hook_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(jit, "_counter", jit._Counter())
    monkeypatch.setattr(knobs.cache, "manager_class", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **event: seen.append(event["repr"]))
    jit._watch.cache_clear()
    jit.mark_starting()
    jit.mark_starting()
    knobs.runtime.jit_post_compile_hook(key="key", repr="kernel", fn=None, compile={})
    assert (jit.compilations(), seen) == (1, ["kernel"])
    jit._watch.cache_clear()


@pytest.mark.gpu
def test_a_launch_that_needs_a_new_variant_is_a_compilation(compiled: Callable[[str], None]) -> None:
    from .spilling_kernel import hold_everything

    x = torch.randn(512, device="cuda")
    launch: Any = hold_everything[(1,)]
    for size in (256, 256, 512):
        launch(x, torch.empty_like(x), SIZE=size)
    assert jit.compilations() == 2

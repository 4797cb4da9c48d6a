"""Programmatic dependent launch: a kernel's programs start while the previous kernel still runs.

    kernel A  ──programs──┐ let_next_start()                     done, memory visible
    kernel B              └─ starts, prefetches weights ── wait_for_previous() ─┴─ reads what A wrote ...

A decode step is a chain of hundreds of kernels of a few microseconds each. If a kernel starts early, its programs are
on the device and its weights in the cache by the time its input is ready.

The rule for every kernel launched with `**launch_options()`: each program calls `wait_for_previous()` before it reads
anything that a kernel wrote, and before its first write. Then, if a kernel has ended, so have all previous ones,
whether they follow the rule or are launched normally (without these options). Two kinds of data may be read before the
call: data that never changes while serving (weights), and data that was written before the last normally launched
kernel (a step's positions and slots). Both functions do nothing in a kernel that is launched normally.

Needs Hopper or later; elsewhere, and in the interpreter, both calls compile to nothing.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as gpu_control


def _supported() -> bool:
    if triton.knobs.runtime.interpret:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


SUPPORTED = tl.constexpr(_supported())


@functools.cache
def launch_options() -> dict[str, bool]:
    """Return the launch options of a kernel that follows the rule."""
    return {"launch_pdl": True} if SUPPORTED.value else {}


@triton.jit
def let_next_start():
    """Allow the next kernel to start once every program of this one has called this or ended."""
    if SUPPORTED:
        gpu_control.gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Wait until all previous kernels have ended, and their results are visible."""
    if SUPPORTED:
        gpu_control.gdc_wait()


@triton.jit
def prefetch(lines):
    """Prefetch memory into L2: `lines` are addresses, one for each 128 bytes."""
    if SUPPORTED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )

"""The processes that compile Triton kernels on behalf of another one (`compiler.py`). They never touch a device.

What passes between that one and the first of these, which forks the rest, is a line of JSON at a time:

    orders     target, once: [backend, arch, warp size]  |  variant: [number, module, specialization]
    replies    [number, what went wrong or null], in the order in which they end
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import sys
from typing import Any, TextIO

_MOST_PROCESSES = 16


@functools.cache
def settle_cache_keys() -> None:
    """Make a kernel's key in Triton's cache the same in all processes. Call it before the first kernel is compiled.

    The key holds the constants that a kernel and its callees read. Triton 3.6 asks a callee for them before the callee
    has looked: the first kernel of a process to call it goes without. Later versions look first, as is done here.
    """
    from triton.runtime.jit import DependenciesFinder

    add_callee = DependenciesFinder._update_hash

    def look_first(finder: Any, callee: Any) -> None:
        _ = callee.cache_key
        add_callee(finder, callee)

    DependenciesFinder._update_hash = look_first


def _serve(orders: TextIO, replies: TextIO) -> None:
    """Read one order a line, hand it to the pool, and write one reply a line. Runs in the first of the processes."""
    from triton.backends.compiler import GPUTarget

    first = orders.readline()
    if not first:
        return
    target = GPUTarget(*json.loads(first))
    prepare_for(target)
    with multiprocessing.get_context("fork").Pool(min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)) as pool:

        def reply(answer: tuple[int, str | None]) -> None:
            print(json.dumps(answer), file=replies, flush=True)

        for line in orders:
            pool.apply_async(_compile, (target, *json.loads(line)), callback=reply)


def _prepare() -> None:
    """Import and hash all that every variant needs, before the orders come and before the workers are forked."""
    import torch  # noqa: F401  the modules of the kernels need it
    import triton.experimental.gluon._runtime  # noqa: F401
    from triton.runtime.cache import triton_key

    settle_cache_keys()
    triton_key()  # reads the whole compiler, hundreds of megabytes, to compute its version, and keeps the result


def prepare_for(target: Any) -> None:
    """Do the part of `_prepare` that depends on the device, a `GPUTarget`. Hashing releases the GIL."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    triton_key()
    make_backend(target).hash()  # asks the assembler for its version


def _compile(target: Any, number: int, module: str, specialization: str) -> tuple[int, str | None]:
    """Compile a variant in one of the forked workers; return its number, and the error if there was one."""
    try:
        _compile_variant(target, module, json.loads(specialization))
    except Exception as error:
        return number, f"{type(error).__name__}: {error}"
    return number, None


def _compile_variant(target: Any, module: str, variant: dict[str, Any]) -> None:
    """Compile from the same source and with the same attributes as the launch, so that the launch finds the result."""
    import triton
    from triton.backends.nvidia import driver
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = getattr(importlib.import_module(module), variant["name"].rpartition(".")[2])
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    constants = zip(variant["constant_keys"], variant["constant_vals"], strict=True)
    attributes = zip(variant["attrs_keys"], variant["attrs_vals"], strict=True)
    source = source_type(
        kernel,
        {name: _tuples(kind) for name, kind in variant["signature"].items()},
        {tuple(key): _constant(value) for key, value in constants},
        {tuple(key): value for key, value in attributes},
    )
    options = {name: _tuples(value) for name, value in variant["options"].items()}
    compiled = triton.compile(source, target=target, options=options)
    if hasattr(driver, "make_launcher"):
        # Triton 3.6 launches each signature by a piece of C of its own, which takes the C compiler a quarter of a
        # second and comes into the same cache.
        driver.CudaLauncher(compiled.src, compiled.metadata)


def _constant(value: Any) -> Any:
    """Return a compile-time argument as it was before it was encoded as JSON."""
    import triton.language as tl

    if tl.dtype.is_dtype(value):
        return tl.dtype(value)
    if isinstance(value, dict) and "constexpr" in value:
        return tl.constexpr(_tuples(value["constexpr"]))
    return _tuples(value)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    # What kernels print while they compile must not get between the replies.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        _prepare()
        _serve(sys.stdin, replies)

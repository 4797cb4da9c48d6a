"""Processes that compile Triton kernels for a client process (`compiler.py`). They never touch a device.

The client talks to the first of them, which forks the others. Messages are lines of JSON:

    orders     target, once: [backend, arch, warp size]  |  variant: [number, module, specialization]
    replies    [number, error or null], in the order of completion
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

    The key includes the global constants that a kernel and its callees use. Triton 3.6 asks a callee for them before
    the callee has collected them, so they are missing in the key of the first kernel of a process that calls it. Later
    versions collect them first, as this patch does.
    """
    from triton.runtime.jit import DependenciesFinder

    add_callee = DependenciesFinder._update_hash

    def look_first(finder: Any, callee: Any) -> None:
        _ = callee.cache_key
        add_callee(finder, callee)

    DependenciesFinder._update_hash = look_first


def _serve(orders: TextIO, replies: TextIO) -> None:
    """Read orders, pass them to the pool, and write replies. Runs in the first process."""
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
    """Import and hash everything that all variants need, before orders arrive and workers are forked."""
    import torch  # noqa: F401  the modules of the kernels need it
    import triton.experimental.gluon._runtime  # noqa: F401
    from triton.runtime.cache import triton_key

    settle_cache_keys()
    triton_key()  # hashes the whole compiler, hundreds of megabytes, for its version, and caches the result


def prepare_for(target: Any) -> None:
    """Do the part of `_prepare` that depends on the device, a `GPUTarget`. Hashing releases the GIL."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    triton_key()
    make_backend(target).hash()  # asks the assembler for its version


def _compile(target: Any, number: int, module: str, specialization: str) -> tuple[int, str | None]:
    """Compile a variant in a forked worker. Return its number, and the error or None."""
    try:
        _compile_variant(target, module, json.loads(specialization))
    except Exception as error:
        return number, f"{type(error).__name__}: {error}"
    return number, None


def _compile_variant(target: Any, module: str, variant: dict[str, Any]) -> None:
    """Compile the same source with the same attributes as the launch, so that the launch finds it in the cache."""
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
        # Triton 3.6 compiles a C launcher for each signature, which takes a quarter of a second and is cached, too.
        driver.CudaLauncher(compiled.src, compiled.metadata)


def _constant(value: Any) -> Any:
    """Return a compile-time argument, decoded from JSON."""
    import triton.language as tl

    if tl.dtype.is_dtype(value):
        return tl.dtype(value)
    if isinstance(value, dict) and "constexpr" in value:
        return tl.constexpr(_tuples(value["constexpr"]))
    return _tuples(value)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    # Output that kernels print while they are compiled must not mix with replies.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        _prepare()
        _serve(sys.stdin, replies)

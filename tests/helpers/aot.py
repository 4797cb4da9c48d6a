"""Compile Triton kernels for an H200 without having one.

    compiled = compile_for_h200(kernel, {"x": "*bf16", "rows": "i32", "stride": "i64:16"}, {"BLOCK": 128}, num_warps=8)
    assert compiled.wgmma and compiled.widest_load_bytes == 16

A signature names the type of every argument that is no constexpr, as Triton writes it; `:16` says that an integer is a
multiple of 16, which Triton finds out for itself at run time. Pointers count as aligned to 16 bytes, as torch's are.

Where this process interprets kernels, a second process compiles them: a process cannot change Triton's mode.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

H200_SHARED_BYTES = 227 * 1024  # the most that one program can have


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for the device."""

    ptx: str
    ttgir: str
    shared_bytes: int
    registers: int  # per thread
    spill_bytes: int  # per thread: stack for the values that did not fit into registers
    wgmma_waits: int  # waits for matrix products in the machine code

    @property
    def wgmma(self) -> bool:
        """Return whether matrix products run on Hopper's warp-group instructions."""
        return "wgmma.mma_async" in self.ptx

    @property
    def waits_for_each_product(self) -> bool:
        """Return whether the assembler waits behind each of several instructions that add up to one product.

        It does so where other code reads or writes a product's registers while the product may be under way.
        """
        return self.wgmma and self.wgmma_waits >= self.ptx.count("wgmma.mma_async")

    @property
    def loads_ahead(self) -> int:
        """Return the most groups of asynchronous copies that are still under way when a loop waits for its tiles."""
        return max((int(pending) for pending in re.findall(r"async_wait .*?num = (\d+)", self.ttgir)), default=0)

    @property
    def widest_load_bytes(self) -> int:
        """Return the most bytes from global memory that one instruction of a thread loads, also asynchronously."""
        loads = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)", self.ptx)
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[\w.:]* \[.*?\], \[.*?\], (0x[0-9a-f]+|\d+)", self.ptx)
        sizes = [int(count or 1) * int(bits) // 8 for count, bits in loads] + [int(size, 0) for size in copies]
        return max(sizes, default=0)


def compile_for_h200(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    *,
    max_spill_bytes: int = 0,
    **options: Any,
) -> Compiled:
    """Compile `kernel` (a `triton.jit` function at the top of a module) down to machine code.

    `options` are Triton's (`num_warps`, `num_stages`, `maxnreg`, ...). Raises `TypeError` for missing or unknown
    arguments, and `AssertionError` for a program that spills or needs more shared memory than there is.
    """
    _check_arguments(kernel, signature, constexprs)
    compiled = _compile(kernel, dict(signature), dict(constexprs), options)
    name, registers = kernel.__name__, compiled.registers
    if compiled.shared_bytes > H200_SHARED_BYTES:
        raise AssertionError(f"{name} needs {compiled.shared_bytes} bytes of shared memory of {H200_SHARED_BYTES}")
    if compiled.spill_bytes > max_spill_bytes:
        raise AssertionError(
            f"{name} spills {compiled.spill_bytes} bytes a thread, at {registers} registers: at most {max_spill_bytes}"
        )
    return compiled


def compile_launches(function: Callable[..., object], *args: object) -> list[str]:
    """Compile for an H200 every kernel that a function launches on CPU tensors, and return the kernels' names.

    The function is at the top of a module. Nothing runs, so values are arbitrary. Unlike the interpreter, the compiler
    also checks that both branches of a condition give values of one type. Raises the compiler's errors.
    """
    return _compiler().submit(_compile_launches, function, args).result()


def _compile_launches(function: Callable[..., object], args: tuple[object, ...]) -> list[str]:
    from triton.runtime.jit import JITFunction

    names = []

    def compile_instead(kernel: Any, *given: object, grid: object, warmup: bool, **named: object) -> None:
        signature, constexprs, options = _arguments_of_launch(kernel, given, named)
        _compile_here(kernel, signature, constexprs, options)
        names.append(kernel.__name__)

    run = JITFunction.run
    JITFunction.run = compile_instead
    try:
        function(*args)
    finally:
        JITFunction.run = run
    return names


def _arguments_of_launch(
    kernel: Any, given: tuple[object, ...], named: dict[str, object]
) -> tuple[dict[str, str], dict[str, object], dict[str, Any]]:
    """Return a launch's argument types, constants and options, as `_compile_here` takes them."""
    from triton.runtime.jit import type_canonicalisation_dict

    values = dict(zip(kernel.arg_names, given, strict=False))
    values |= {name: value for name, value in named.items() if name in kernel.arg_names}
    options = {name: value for name, value in named.items() if name in ("num_warps", "num_stages", "maxnreg")}
    signature: dict[str, str] = {}
    constexprs: dict[str, object] = {}
    for parameter in kernel.params:
        value = values.get(parameter.name, parameter.default)
        if parameter.is_constexpr or value is None:
            constexprs[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            signature[parameter.name] = "*" + type_canonicalisation_dict[dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            is_multiple = not parameter.do_not_specialize and isinstance(value, int) and value % 16 == 0
            signature[parameter.name] = "i32:16" if is_multiple else "i32"
    return signature, constexprs, options


def _check_arguments(kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, object]) -> None:
    known, given = set(kernel.arg_names), {*signature, *constexprs}
    if given != known or len(given) != len(signature) + len(constexprs):
        raise TypeError(
            f"{kernel.__name__}: left out {sorted(known - given)}, unknown {sorted(given - known)}, "
            f"twice {sorted(set(signature) & set(constexprs))}"
        )


def _compile(
    kernel: Any, signature: dict[str, str], constexprs: dict[str, object], options: dict[str, Any]
) -> Compiled:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return _compile_here(kernel, signature, constexprs, options)
    function = kernel.fn
    task = _compiler().submit(_compile_by_name, function.__module__, function.__name__, signature, constexprs, options)
    return task.result()


@functools.cache
def _compiler() -> ProcessPoolExecutor:
    """Return a running process whose Triton compiles instead of interpreting."""
    mode = os.environ.pop("TRITON_INTERPRET")
    try:
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(os.getpid).result()
    finally:
        os.environ["TRITON_INTERPRET"] = mode
    return pool


def _compile_by_name(
    module: str, name: str, signature: dict[str, str], constexprs: dict[str, object], options: dict[str, Any]
) -> Compiled:
    return _compile_here(getattr(importlib.import_module(module), name), signature, constexprs, options)


def _compile_here(
    kernel: Any, signature: dict[str, str], constexprs: dict[str, object], options: dict[str, Any]
) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    types, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        types[name], _, multiple = signature.get(name, "constexpr").partition(":")
        if multiple == "16" or types[name].startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, types, constexprs, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    report = _disassembled(binary.asm["cubin"])
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert usage, report
    registers, spill_bytes = int(usage[1]), int(usage[2])
    waits = report.count("WARPGROUP.DEPBAR")
    return Compiled(binary.asm["ptx"], binary.asm["ttgir"], binary.metadata.shared, registers, spill_bytes, waits)


def _disassembled(machine_code: bytes) -> str:
    """Return the instructions and the use of registers."""
    import triton

    reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        command = [reader, "-res-usage", "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

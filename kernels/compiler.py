"""Compiles Triton kernels in other processes before they are launched, all at the same time.

    compiler = Compiler()                 starts, and imports torch and Triton while this process does the same
    with recording() as variants:         launches of kernels that were never compiled are noted and skipped
        ...
    compiler.compile(variants)            into Triton's cache on disk, where the first launch finds them
    compiler.close()

One variant takes a core half a second or more, and threads of one process get in each other's way: compiling is Python
for the most part. The other processes never touch a device, and where they fail, the first launch compiles as ever.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TextIO

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 16
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Variant:
    """A kernel for certain types, constants and options."""

    module: str
    specialization: str  # JSON, as Triton writes it


@contextlib.contextmanager
def recording() -> Iterator[list[Variant]]:
    """Within, a kernel that was never compiled is neither compiled nor launched, but noted once.

    What such kernels would have written stays as it was, which is zero in tensors that torch allocates within.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from triton import knobs

    class Zeros(TorchFunctionMode):
        """Nothing is left uninitialized: the kernels that run may take what others left out for an index."""

        zeroing: ClassVar[dict[Any, Any]] = {
            torch.empty: torch.zeros,
            torch.empty_like: torch.zeros_like,
            torch.Tensor.new_empty: torch.Tensor.new_zeros,
        }

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self.zeroing.get(func, func)(*args, **(kwargs or {}))

    found: dict[Variant, None] = {}
    variants: list[Variant] = []

    def note(**event: Any) -> bool:
        variant = Variant(event["fn"].module, event["compile"]["specialization_data"])
        if variant not in found:
            found[variant] = None
            variants.append(variant)
        return True  # do not compile

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        with Zeros():
            yield variants
    finally:
        knobs.runtime.jit_cache_hook = before


def start_compiler() -> Compiler | None:
    """A `Compiler` where there is an NVIDIA device and a core to spare. Loads neither torch nor Triton."""
    if not Path("/dev/nvidiactl").exists() or len(os.sched_getaffinity(0)) < 2:
        return None
    return Compiler()


class Compiler:
    """The other processes, from this one's side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )

    def compile(self, variants: Sequence[Variant]) -> None:
        """Returns when all are compiled, or failed to. The variants are for this process's device."""
        from triton.runtime import driver

        target = driver.active.get_current_target()
        order = {
            "target": [target.backend, target.arch, target.warp_size],
            "variants": [[variant.module, variant.specialization] for variant in variants],
        }
        try:
            reply, _ = self._process.communicate(json.dumps(order) + "\n", timeout=_TIMEOUT_S)
            errors = json.loads(reply)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            logger.warning("kernels are compiled one after another, since the compiling processes failed: %s", error)
            return
        for variant, failure in zip(variants, errors, strict=True):
            if failure:
                logger.warning("a kernel of %s was not compiled ahead: %s", variant.module, failure)

    def close(self) -> None:
        """Ends the processes. Closing twice changes nothing."""
        self._process.kill()
        self._process.communicate()


def _serve(orders: TextIO, replies: TextIO) -> None:
    """In the other process: one order, one reply."""
    _prepare()
    line = orders.readline()
    if not line:
        return
    order = json.loads(line)
    _prepare_for(order["target"])
    tasks = [(order["target"], module, specialization) for module, specialization in order["variants"]]
    longest_first = sorted(range(len(tasks)), key=lambda index: _size(*tasks[index][1:]), reverse=True)
    num_processes = max(1, min(len(tasks), len(os.sched_getaffinity(0)), _MOST_PROCESSES))
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        done = pool.starmap(_compile, [tasks[index] for index in longest_first], chunksize=1)
    failures = dict(zip(longest_first, done, strict=True))
    json.dump([failures[index] for index in range(len(tasks))], replies)


def _prepare() -> None:
    """What takes seconds and is the same for all variants comes before the order, and before the forks inherit it."""
    import torch  # noqa: F401  the modules of the kernels need it
    import triton.experimental.gluon._runtime  # noqa: F401
    from triton.runtime.cache import triton_key

    triton_key()  # reads the whole compiler, hundreds of megabytes, to tell its version, and keeps what came out


def _prepare_for(target: Sequence[Any]) -> None:
    """The same, for what depends on the device."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    make_backend(GPUTarget(*target)).hash()  # asks the assembler for its version


def _size(module: str, specialization: str) -> tuple[bool, int]:
    """A guess at how long a variant takes: the last ones should be short, or their processes work alone.

    Kernels in Gluon spell their pipelines out and take longest; of the others, those of large modules.
    """
    try:
        loaded = importlib.import_module(module)
        kernel = getattr(loaded, json.loads(specialization)["name"].rpartition(".")[2])
        return kernel.is_gluon(), Path(str(loaded.__file__)).stat().st_size
    except Exception:  # compiling it fails as well, and says why
        return False, 0


def _compile(target: Sequence[Any], module: str, specialization: str) -> str | None:
    """What went wrong, if anything."""
    try:
        _compile_variant(target, module, json.loads(specialization))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _compile_variant(target: Sequence[Any], module: str, variant: dict[str, Any]) -> None:
    """From the same source with the same words as the launch will ask for, so that it finds the result."""
    import triton
    from triton.backends.compiler import GPUTarget
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
    triton.compile(source, target=GPUTarget(*target), options=options)


def _constant(value: Any) -> Any:
    """As it was before it became JSON."""
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
        _serve(sys.stdin, replies)

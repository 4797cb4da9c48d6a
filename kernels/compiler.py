"""Compiles Triton kernels in other processes before they are launched, all at the same time.

    compiler = Compiler()                 starts, and imports torch and Triton while this process does the same
    with recording(compiler.submit):      launches of kernels that were never compiled are noted and skipped ...
        ...                               ... and compile from then on
    compiler.wait()                       all lie in Triton's cache on disk, where the first launch finds them
    compiler.close()

One variant takes a core half a second or more, and threads of one process get in each other's way: compiling is Python
for the most part. The other processes never touch a device, and where they fail, the first launch compiles as ever.

What passes between this process and the first of the others, which forks the rest, is a line of JSON at a time:

    orders     target, once: [backend, arch, warp size]  |  variant: [number, module, specialization]
    replies    [number, what went wrong or null], in the order in which they end
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TextIO

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 16
_TIMEOUT_S = 120.0  # between one variant and the next
_PIPE_BYTES = 1 << 20  # orders of some hundred variants: who submits is not held up while the processes still import


@dataclass(frozen=True)
class Variant:
    """A kernel for certain types, constants and options."""

    module: str
    specialization: str  # JSON, as Triton writes it


@contextlib.contextmanager
def recording(submit: Callable[[Variant], object] | None = None) -> Iterator[list[Variant]]:
    """Within, a kernel that was never compiled is neither compiled nor launched, but noted once, and submitted.

    What such kernels would have written stays as it was, which is zero in tensors that torch allocates within.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from triton import knobs

    settle_cache_keys()

    class Zeros(TorchFunctionMode):
        """Nothing is left uninitialized: the kernels that run may take what others left out for an index."""

        zeroing: ClassVar[dict[Any, Any]] = {
            torch.empty: torch.zeros,
            torch.empty_like: torch.zeros_like,
            torch.Tensor.new_empty: torch.Tensor.new_zeros,
        }

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self.zeroing.get(func, func)(*args, **(kwargs or {}))

    variants: list[Variant] = []
    skipped: list[tuple[dict[Any, Any], Any]] = []

    def note(**event: Any) -> bool:
        function, key = event["fn"].jit_function, event["key"]
        kernels = function.device_caches[event["compile"]["device"]][0]
        kernels[key] = _Skipped()
        skipped.append((kernels, key))
        variant = Variant(event["fn"].module, event["compile"]["specialization_data"])
        variants.append(variant)
        if submit is not None:
            submit(variant)
        return True  # do not compile

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        with Zeros():
            yield variants
    finally:
        knobs.runtime.jit_cache_hook = before
        for kernels, key in skipped:
            del kernels[key]


class _Skipped:
    """Stands for a noted kernel among those that a function has, so that its next launch is passed over as fast."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        return None


@functools.cache
def settle_cache_keys() -> None:
    """Makes a kernel's key in Triton's cache the same in all processes. Comes before the first kernel is compiled.

    The key holds the constants that a kernel and its callees read. Triton 3.6 asks a callee for them before the callee
    has looked: the first kernel of a process to call it goes without. Later versions look first, as is done here.
    """
    from triton.runtime.jit import DependenciesFinder

    add_callee = DependenciesFinder._update_hash

    def look_first(finder: Any, callee: Any) -> None:
        _ = callee.cache_key
        add_callee(finder, callee)

    DependenciesFinder._update_hash = look_first


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
            bufsize=1,
            pipesize=_PIPE_BYTES,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        self._preparing: threading.Thread | None = None  # what the first launch in this process needs as well
        self._num_submitted = 0
        self._waiting: dict[int, Variant] = {}
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()  # the last one is empty
        threading.Thread(target=self._listen, name="compiler", daemon=True).start()

    def submit(self, variant: Variant) -> None:
        """Starts to compile a variant for this process's device, and returns at once."""
        if self._preparing is None:
            target = _current_target()
            self._order([target.backend, target.arch, target.warp_size])
            self._preparing = threading.Thread(target=_prepare_for, args=(target,), name="triton-key", daemon=True)
            self._preparing.start()
        self._order([self._num_submitted, variant.module, variant.specialization])
        self._waiting[self._num_submitted] = variant
        self._num_submitted += 1

    def wait(self) -> None:
        """Returns when all that was submitted is compiled, or failed to. More may be submitted afterwards."""
        if self._preparing is not None:
            self._preparing.join()
        while self._waiting:
            try:
                reply = self._replies.get(timeout=_TIMEOUT_S)
            except queue.Empty:
                reply = ""
            if not reply:
                logger.warning(
                    "%d kernels are compiled one after another, since the compiling processes failed",
                    len(self._waiting),
                )
                self._waiting.clear()
                self._replies.put("")
                return
            number, failure = json.loads(reply)
            variant = self._waiting.pop(number, None)
            if variant is not None and failure:
                logger.warning("a kernel of %s was not compiled ahead: %s", variant.module, failure)

    def close(self) -> None:
        """Ends the processes, which may take them a moment. Closing twice changes nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # they may have ended by themselves
            self._process.stdin.close()

    def _order(self, order: Sequence[Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # that the processes are gone, `wait` finds out
            self._process.stdin.write(json.dumps(order) + "\n")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._replies.put(line)
        self._replies.put("")
        self._process.wait()


def _current_target() -> Any:
    from triton.runtime import driver

    return driver.active.get_current_target()


def _serve(orders: TextIO, replies: TextIO) -> None:
    """In the first of the other processes: one order a line, one reply a line."""
    from triton.backends.compiler import GPUTarget

    first = orders.readline()
    if not first:
        return
    target = GPUTarget(*json.loads(first))
    _prepare_for(target)
    with multiprocessing.get_context("fork").Pool(min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)) as pool:

        def reply(answer: tuple[int, str | None]) -> None:
            print(json.dumps(answer), file=replies, flush=True)

        for line in orders:
            pool.apply_async(_compile, (target, *json.loads(line)), callback=reply)


def _prepare() -> None:
    """What takes seconds and is the same for all variants comes before the orders, and before the forks inherit it."""
    import torch  # noqa: F401  the modules of the kernels need it
    import triton.experimental.gluon._runtime  # noqa: F401
    from triton.runtime.cache import triton_key

    settle_cache_keys()
    triton_key()  # reads the whole compiler, hundreds of megabytes, to tell its version, and keeps what came out


def _prepare_for(target: Any) -> None:
    """The same, for what depends on the device, a `GPUTarget`. Hashing leaves the interpreter to other threads."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    triton_key()
    make_backend(target).hash()  # asks the assembler for its version


def _compile(target: Any, number: int, module: str, specialization: str) -> tuple[int, str | None]:
    """In one of the forks: the number of the variant, and what went wrong, if anything."""
    try:
        _compile_variant(target, module, json.loads(specialization))
    except Exception as error:
        return number, f"{type(error).__name__}: {error}"
    return number, None


def _compile_variant(target: Any, module: str, variant: dict[str, Any]) -> None:
    """From the same source with the same words as the launch will ask for, so that it finds the result."""
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
        _prepare()
        _serve(sys.stdin, replies)

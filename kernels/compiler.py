"""Ahead-of-time compilation of Triton kernels in other processes, in parallel.

    compiler = Compiler()                 starts, and imports torch and Triton while this process does the same
    with recording(compiler.submit):      launches of kernels that were never compiled are noted and skipped ...
        ...                               ... and compile from then on
    compiler.wait()                       all lie in Triton's cache on disk, where the first launch finds them
    compiler.close()

One variant takes a core half a second or more, and threads of one process get in each other's way: compiling is Python
for the most part. The other processes never touch a device, and where they fail, the first launch compiles as ever.

What the other processes do is in `compile_server.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from . import compile_server

logger = logging.getLogger(__name__)

_TIMEOUT_S = 120.0  # between one variant and the next
_PIPE_BYTES = 1 << 20  # some hundred orders: `submit` does not block while the processes still import


@dataclass(frozen=True)
class Variant:
    """A kernel for certain types, constants and options."""

    module: str
    specialization: str  # JSON, as Triton writes it


@contextlib.contextmanager
def recording(submit: Callable[[Variant], object] | None = None) -> Iterator[list[Variant]]:
    """Record kernel launches: within, a kernel that was never compiled is not launched, but recorded once and
    submitted.

    What such kernels would have written stays as it was, which is zero in tensors that torch allocates within.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from triton import knobs

    compile_server.settle_cache_keys()

    class Zeros(TorchFunctionMode):
        """Allocate zeros in place of uninitialized memory: the kernels that run may read what skipped ones left out."""

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
    """Placeholder for a recorded kernel in its function's cache, so that its next launch is skipped as fast."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        return None


def start_compiler() -> Compiler | None:
    """Return a `Compiler` where there is an NVIDIA device and a core to spare. Imports neither torch nor Triton."""
    if not Path("/dev/nvidiactl").exists() or len(os.sched_getaffinity(0)) < 2:
        return None
    return Compiler()


class Compiler:
    """A handle on the compiling processes. `process` is the one that has started the others."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", compile_server.__name__],
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
        """Start to compile a variant for this process's device. Returns at once."""
        if self._preparing is None:
            target = _current_target()
            self._order([target.backend, target.arch, target.warp_size])
            self._preparing = threading.Thread(
                target=compile_server.prepare_for, args=(target,), name="triton-key", daemon=True
            )
            self._preparing.start()
        self._order([self._num_submitted, variant.module, variant.specialization])
        self._waiting[self._num_submitted] = variant
        self._num_submitted += 1

    def wait(self) -> None:
        """Wait until all that was submitted is compiled, or failed to. More may be submitted afterwards."""
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
        """Close the processes' input, after which they end. Closing twice changes nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # they may have ended by themselves
            self.process.stdin.close()

    def _order(self, order: Sequence[Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # that the processes are gone, `wait` finds out
            self.process.stdin.write(json.dumps(order) + "\n")

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._replies.put(line)
        self._replies.put("")
        self.process.wait()


def _current_target() -> Any:
    from triton.runtime import driver

    return driver.active.get_current_target()

"""Ahead-of-time compilation of Triton kernels in other processes, in parallel.

    compiler = Compiler()                 the processes start, and import torch and Triton while this process does, too
    with recording(compiler.submit):      launches of kernels that were never compiled are recorded and skipped ...
        ...                               ... and the processes begin to compile them
    compiler.wait()                       all are in Triton's cache on disk, where the first launch finds them
    compiler.close()

`RecordedVariants` keeps what was recorded, so that a later start of the same engine need not record it again.

A variant takes a core half a second or more. Processes are used because compiling is mostly Python, so threads would
wait for the GIL. They never touch a device. If they fail, the first launch compiles as usual. Their code is in
`compile_server.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
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

_TIMEOUT_S = 120.0  # longest wait for the next reply
_SOURCES = {".py", ".json"}  # code, and tuned options
_PIPE_BYTES = 1 << 20  # some hundred orders, so that `submit` does not block while the processes still import


@dataclass(frozen=True)
class Variant:
    """A kernel for certain types, constants and options."""

    module: str
    specialization: str  # JSON, as Triton writes it


@contextlib.contextmanager
def recording(submit: Callable[[Variant], object] | None = None) -> Iterator[list[Variant]]:
    """Within this context, record kernels that were never compiled, and submit them, instead of launching them.

    Their outputs are not written. Tensors that torch allocates in the context are zeros instead of uninitialized.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from triton import knobs

    compile_server.settle_cache_keys()

    class Zeros(TorchFunctionMode):
        """Allocates zeros instead of uninitialized memory, since kernels that run may read outputs of skipped ones."""

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


class RecordedVariants:
    """The variants that an engine launches, in a file beside Triton's cache.

    `facts` are what determines them, as objects whose `repr` is the same in every process; the code in `folders`, the
    device and the versions of Triton and torch are added. If the list is wrong nevertheless, only time is lost: a
    kernel that it lacks is compiled when it is first launched.
    """

    def __init__(self, facts: Sequence[object], folders: Sequence[Path]) -> None:
        import torch
        import triton
        from triton import knobs

        digest = hashlib.sha256(repr([*facts, _current_target(), triton.__version__, torch.__version__]).encode())
        for path in sorted(path for folder in folders for path in folder.rglob("*.*") if path.suffix in _SOURCES):
            digest.update(path.read_bytes())
        self.path = Path(knobs.cache.dir) / "baton" / f"{digest.hexdigest()}.json"

    def load(self) -> list[Variant] | None:
        """Return the variants, or None if they were never saved, or cannot be read."""
        try:
            return [Variant(*variant) for variant in json.loads(self.path.read_text())]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s is ignored: %s", self.path, error)
            return None

    def save(self, variants: Sequence[Variant]) -> None:
        """Save the variants. Without room or permission, the next start records them again."""
        part = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps([[variant.module, variant.specialization] for variant in variants]))
            part.replace(self.path)
        except OSError as error:
            logger.warning("the next start records its kernels again: %s", error)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class _Skipped:
    """Placeholder for a recorded kernel in its function's cache, so that its next launch is skipped quickly."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        return None


def start_compiler() -> Compiler | None:
    """Return a `Compiler` if there are an NVIDIA device and a spare core. Imports neither torch nor Triton."""
    if not Path("/dev/nvidiactl").exists() or len(os.sched_getaffinity(0)) < 2:
        return None
    return Compiler()


class Compiler:
    """A handle on the compiling processes. `process` is the first one, which starts the others."""

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
        self._preparing: threading.Thread | None = None  # prepares this process's first launch in the same way
        self._num_submitted = 0
        self._waiting: dict[int, Variant] = {}
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()  # an empty string marks the end
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
        """Wait until all submitted variants have been compiled or have failed. More may be submitted afterwards."""
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
        """Close the processes' input, after which they end. Closing twice has no effect."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # they may have ended by themselves
            self.process.stdin.close()

    def _order(self, order: Sequence[Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # if the processes are gone, `wait` notices
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

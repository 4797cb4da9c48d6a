"""CPU kernels in C++: a ctypes library that shares torch's threads.

    kernel = native.function("baton_rms_norm", POINTER, ..., I64, INT)
    if kernel is None: ...                      unavailable here: one warning was logged; use the reference
    kernel(x.data_ptr(), ..., rows, threads)    a plain C call, which releases the GIL

Sources are the `*.cpp` of this folder. Dtypes are passed as `DTYPE_NUMBER`, threads as `torch.get_num_threads()`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from pathlib import Path

import torch
from torch import Tensor

from .build import NativeBuildError, library_path
from .calls import F32, I64, INT, POINTER, ROWS, NativeFunction

__all__ = [
    "DTYPE_NUMBER",
    "F32",
    "I64",
    "INT",
    "POINTER",
    "ROWS",
    "NativeBuildError",
    "NativeFunction",
    "empty_on_huge_pages",
    "function",
    "prepare",
]

logger = logging.getLogger(__name__)

DTYPE_NUMBER = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types as the C functions number them; others go to the references."""


def prepare() -> Path:
    """Build (seconds, the first time) and load the kernels; return the library's path.

    For installers, and for the start of a process, so that later calls of `function` are fast. Raises
    `NativeBuildError` with the reason if the kernels are unavailable.
    """
    return Path(_load()._name)


def function(name: str, *arguments: type, returns: type | None = None) -> NativeFunction | None:
    """Declare a C function and its argument types. Return None, after one warning, if the library is unavailable."""
    library = _library()
    return None if library is None else NativeFunction(library, name, arguments, returns)


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return _load()
    except NativeBuildError as error:
        logger.warning("CPU kernels are not available, so plain torch is used, many times slower: %s", error)
        return None


@functools.cache
def _load() -> ctypes.CDLL:
    path = library_path()
    _share_openmp_of_torch()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeBuildError(f"{path} does not load: {error}") from error


def _share_openmp_of_torch() -> None:
    """Make the symbols of torch's OpenMP runtime visible to libraries that are loaded from now on."""
    for path in _mapped_libraries():
        if path.name.startswith(("libgomp", "libiomp5")):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            return
    raise NativeBuildError("torch runs without an OpenMP runtime that g++ code can share (libgomp or libiomp5)")


def _mapped_libraries() -> list[Path]:
    """Return the files that this process has mapped. Importing torch loads its OpenMP runtime."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines)
    return [Path(path) for path in paths if path.startswith("/")]


HUGE_PAGE_BYTES = 2 << 20


def empty_on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialized CPU tensor on huge pages (2 MiB), as far as the system has them.

    It begins at the border of a huge page. Address space for one more page is reserved, but memory is only used for
    what is written.
    """
    numel = math.prod(shape)
    num_bytes = numel * dtype.itemsize
    advise = _advise()
    if advise is None or num_bytes < HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = torch.empty(num_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    advise(memory.data_ptr() + start, num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return memory[start : start + num_bytes].view(dtype).view(shape)


@functools.cache
def _advise() -> NativeFunction | None:
    return function("baton_advise_huge_pages", POINTER, I64)

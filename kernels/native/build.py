"""Compiles the C++ of this folder, once for each combination of source, compiler and CPU.

    ~/.cache/baton/native-<key>.so        (or $XDG_CACHE_HOME/baton)

The library is not linked to an OpenMP runtime. Its symbols resolve to the runtime that torch has loaded, so that both
share one pool of threads.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent
COMPILE_FLAGS = ("-std=c++17", "-O2", "-march=native", "-fopenmp", "-fPIC", "-Wno-psabi")
# -O2: what matters is vectorised by hand, and -O3 takes minutes over 16 floats on CPUs with narrower vectors.
COMPILE_TIMEOUT_S = 300


class NativeBuildError(RuntimeError):
    """The C++ kernels cannot be built here. The message names the missing part."""


def library_path() -> Path:
    """Return the compiled library, after building it where the cache does not hold it. Raises `NativeBuildError`."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise NativeBuildError("no C++ compiler: install g++ (Debian and Ubuntu: apt-get install g++)")
    path = cache_folder() / f"native-{_cache_key(compiler)}.so"
    if not path.exists():
        try:
            _build(compiler, path)
        except OSError as error:  # for example a full disk, or no memory for the compiler: the references are used
            raise NativeBuildError(f"the kernels cannot be built in {path.parent}: {error}") from error
    return path


def cache_folder() -> Path:
    """Return a folder that only this user can write to: the user's cache, or a private one if that is read-only."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(root) / "baton"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return _private_temporary_folder()
    return folder if os.access(folder, os.W_OK) else _private_temporary_folder()


@functools.cache
def _private_temporary_folder() -> Path:
    """Create a folder that is deleted when this process exits."""
    folder = tempfile.mkdtemp(prefix="baton-native-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _cache_key(compiler: str) -> str:
    digest = hashlib.sha256()
    for part in (*COMPILE_FLAGS, compiler, _compiler_version(compiler), platform.machine(), _cpu_flags()):
        digest.update(part.encode() + b"\0")
    for source in sorted((*SOURCE_FOLDER.glob("*.h"), *SOURCE_FOLDER.glob("*.cpp"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout


def _cpu_flags() -> str:
    """Return the description of the CPU that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.split("\t")[0].split(":")[0].strip() in wanted))


def _build(compiler: str, path: Path) -> None:
    """Compile next to `path`, then rename: if several processes do so, the last one replaces an equal file."""
    sources = sorted(SOURCE_FOLDER.glob("*.cpp"))
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        objects = [os.path.join(folder, source.stem + ".o") for source in sources]
        _run_all(
            [compiler, *COMPILE_FLAGS, "-c", str(source), "-o", target]
            for source, target in zip(sources, objects, strict=True)
        )
        # Without -fopenmp here: that would name a runtime of its own.
        library = os.path.join(folder, "library.so")
        _run_all([[compiler, "-shared", *objects, "-o", library]])
        os.replace(library, path)


def _run_all(commands: Iterable[list[str]]) -> None:
    """Run the commands in parallel, and wait for all, so that none writes into a folder that has been deleted."""
    started = [
        (command, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for command in commands
    ]
    failures = []
    for command, process in started:
        try:
            output, _ = process.communicate(timeout=COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        if process.returncode != 0:
            failures.append(f"{' '.join(command)}\n{output[-4000:]}")
    if failures:
        raise NativeBuildError("the compiler failed:\n" + "\n".join(failures))

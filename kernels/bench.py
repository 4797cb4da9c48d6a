"""The kernel benchmark: time, bandwidth and arithmetic of every op, and its share of the roofline.

    python -m baton.kernels.bench [OP ...]      or      baton bench kernels

An op is included if it has a module `bench.py` with a function `cases(device) -> Iterable[BenchCase]`.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from . import __name__ as library_name
from . import __path__ as library_path
from .compiler import recording, start_compiler
from .roofline import BenchCase, BenchRow, measure, memory_bytes_per_s


def best_device() -> torch.device:
    """Return the GPU that torch would use, or the CPU if there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def run_all(ops: Sequence[str] = (), device: torch.device | None = None) -> list[BenchRow]:
    """Measure every case of the named ops, or of all. Raises `ValueError` for an op without a `bench.py`."""
    device = device or best_device()
    if device.type == "cuda":
        _compile_ahead(ops, device)
    return [measure(case) for case in find_cases(ops, device)]


def _compile_ahead(ops: Sequence[str], device: torch.device) -> None:
    """Compile all kernels of the cases in parallel, in other processes: serially, it takes minutes."""
    compiler = start_compiler()
    if compiler is None:
        return
    try:
        with recording(compiler.submit):
            for case in find_cases(ops, device):
                case.run()
        compiler.wait()
    finally:
        compiler.close()


def find_cases(ops: Sequence[str], device: torch.device) -> Iterator[BenchCase]:
    known = ops_with_bench()
    unknown = sorted(set(ops) - set(known))
    if unknown:
        raise ValueError(f"no bench for {', '.join(unknown)}: choose from {', '.join(known)}")
    for op in ops or known:
        yield from importlib.import_module(f"{library_name}.{op}.bench").cases(device)


def ops_with_bench() -> list[str]:
    folders = [module.name for module in pkgutil.iter_modules(library_path) if module.ispkg]
    return [name for name in folders if importlib.util.find_spec(f"{library_name}.{name}.bench") is not None]


def table(rows: Sequence[BenchRow], device: torch.device | None = None) -> Table:
    device = device or best_device()
    on_cpu = device.type == "cpu"
    machine = f"CPU, {torch.get_num_threads()} threads" if on_cpu else torch.cuda.get_device_name(device)
    result = Table(title=f"Kernels on {machine}; memory {memory_bytes_per_s(device) / 1e9:.1f} GB/s measured")
    for name, justify in COLUMNS:
        result.add_column(name, justify=justify)
    for row in rows:
        work = (f"{row.time_us:,.1f}", f"{row.num_bytes / 1e6:,.1f}", _unless_none(row.flop / 1e9, 1))
        speed = (f"{row.gb_s:,.1f}", _unless_none(row.gflop_s, 0))
        result.add_row(row.op, row.shape, row.dtype, *work, *speed, row.bound, f"{row.roof_share:.0%}")
    return result


def _unless_none(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if value else ""


COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("op", "left"),
    ("shape", "left"),
    ("dtype", "left"),
    ("us", "right"),
    ("MB", "right"),
    ("GFLOP", "right"),
    ("GB/s", "right"),
    ("GFLOP/s", "right"),
    ("bound by", "left"),
    ("of roof", "right"),
)
WIDTH = 150  # width of the table if it is not printed to a terminal


def main(ops: Sequence[str] = ()) -> None:
    """Measure and print the table."""
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table(run_all(ops)))


if __name__ == "__main__":
    main(sys.argv[1:])

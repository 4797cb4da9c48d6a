"""One table of all ops: time, bandwidth, arithmetic, and the share of the roof that each reaches.

    python -m baton.kernels.bench [OP ...]      or      baton bench kernels

An op takes part by a module `bench.py` with a function `cases() -> Iterable[BenchCase]`.
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
from .roofline import BenchCase, BenchRow, measure, memory_bytes_per_s


def run_all(ops: Sequence[str] = ()) -> list[BenchRow]:
    """Measures every case of the ops named, or of all. Raises `ValueError` for an op that has no bench."""
    return [measure(case) for case in find_cases(ops)]


def find_cases(ops: Sequence[str] = ()) -> Iterator[BenchCase]:
    known = ops_with_bench()
    unknown = sorted(set(ops) - set(known))
    if unknown:
        raise ValueError(f"no bench for {', '.join(unknown)}: choose from {', '.join(known)}")
    for op in ops or known:
        yield from importlib.import_module(f"{library_name}.{op}.bench").cases()


def ops_with_bench() -> list[str]:
    folders = [module.name for module in pkgutil.iter_modules(library_path) if module.ispkg]
    return [name for name in folders if importlib.util.find_spec(f"{library_name}.{name}.bench") is not None]


def table(rows: Sequence[BenchRow]) -> Table:
    threads, bandwidth = torch.get_num_threads(), memory_bytes_per_s() / 1e9
    result = Table(title=f"CPU kernels, {threads} threads; memory {bandwidth:.1f} GB/s measured")
    for name, justify in COLUMNS:
        result.add_column(name, justify=justify)
    for row in rows:
        arithmetic = f"{row.gflop_s:.0f}" if row.gflop_s else ""
        speed = (f"{row.time_us:.1f}", f"{row.gb_s:.1f}", arithmetic)
        result.add_row(row.op, row.shape, row.dtype, *speed, row.bound, f"{row.roof_share:.0%}")
    return result


COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("op", "left"),
    ("shape", "left"),
    ("dtype", "left"),
    ("us", "right"),
    ("GB/s", "right"),
    ("GFLOP/s", "right"),
    ("bound by", "left"),
    ("of roof", "right"),
)


def main(ops: Sequence[str] = ()) -> None:
    """Measures and prints the table."""
    Console(width=None if sys.stdout.isatty() else 120).print(table(run_all(ops)))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Slices of the tests marked `exhaustive`: together they are all tests, and of three in a row one has each function."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .. import ROOT
from ..helpers.slices import Slice

COUNT = 12
CASES = {"two": 2, "few": 5, "as many as slices": 12, "one more": 13, "many": 126}
SLICES = [Slice(number, COUNT) for number in range(1, COUNT + 1)]


def node_ids(function: str) -> list[str]:
    return [f"tests/unit/test_x.py::{function}[{case}]" for case in range(CASES[function])]


def function_of(node_id: str) -> str:
    return node_id.partition("::")[2].partition("[")[0]


ALONE = "tests/unit/test_x.py::test_without_parameters"
ALL = [ALONE, *(node_id for function in CASES for node_id in node_ids(function))]


def test_all_slices_together_are_all_tests() -> None:
    assert set[str]().union(*(each.of(ALL) for each in SLICES)) == set(ALL)


@pytest.mark.parametrize("function", CASES)
def test_slices_have_equal_parts_of_a_function(function: str) -> None:
    counts = [Counter(map(function_of, each.of(ALL)))[function] for each in SLICES]
    assert set(counts) <= {CASES[function] // COUNT, CASES[function] // COUNT + 1}
    assert sum(counts) == max(4, CASES[function])


@pytest.mark.parametrize("function", [*CASES, function_of(ALONE)])
def test_of_three_slices_in_a_row_one_has_a_case(function: str) -> None:
    has = [function in map(function_of, each.of(ALL)) for each in SLICES]
    assert all(any(has[at % COUNT] for at in range(first, first + 3)) for first in range(COUNT))


def test_neither_the_order_nor_other_functions_change_a_slice() -> None:
    alone = Slice(2, COUNT).of(node_ids("many"))
    assert len(alone) > 1
    assert alone == Slice(2, COUNT).of(reversed(ALL)) & set(node_ids("many"))


def test_one_slice_is_all_tests() -> None:
    assert Slice.parse("1/1").of(ALL) == set(ALL)


@pytest.mark.parametrize("text", ["", "2", "0/4", "5/4", "1/0", "-1/4", "a/b", "1/4/2"])
def test_what_is_no_slice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no slice: give NUMBER/COUNT"):
        Slice.parse(text)


EXAMPLE = """
import pytest

@pytest.mark.exhaustive
@pytest.mark.parametrize("case", range(6))
def test_many(case): ...

@pytest.mark.parametrize("case", range(6))
def test_each(case): ...
"""


def test_a_run_leaves_out_other_slices_of_exhaustive_tests_and_no_other_test(tmp_path: Path) -> None:
    file = tmp_path / "test_example.py"
    file.write_text(EXAMPLE)

    def collected(*options: str) -> Counter[str]:
        words = [
            "-p",
            "tests.conftest",
            "-c",
            str(ROOT / "pyproject.toml"),
            "--collect-only",
            "-q",
            *options,
            str(file),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        return Counter(function_of(line) for line in done.stdout.splitlines() if "::" in line)

    assert collected() == {"test_many": 6, "test_each": 6}
    assert collected("--slice", "1/3") == {"test_many": 2, "test_each": 6}

"""Slices of the tests marked `exhaustive`: together they are all tests, and each has a case of every function."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .. import ROOT
from ..helpers.slices import Slice

CASES = {"few": 3, "as many as slices": 4, "one more": 5, "many": 42}
SLICES = [Slice(number, 4) for number in range(1, 5)]


def node_ids(function: str) -> list[str]:
    return [f"tests/unit/test_x.py::{function}[{case}]" for case in range(CASES[function])]


def function_of(node_id: str) -> str:
    return node_id.partition("::")[2].partition("[")[0]


ALONE = "tests/unit/test_x.py::test_without_parameters"
ALL = [ALONE, *(node_id for function in CASES for node_id in node_ids(function))]


def test_all_slices_together_are_all_tests() -> None:
    assert set[str]().union(*(each.of(ALL) for each in SLICES)) == set(ALL)


@pytest.mark.parametrize("function", CASES)
def test_each_slice_has_its_part_of_a_function_and_at_least_one_case(function: str) -> None:
    counts = [Counter(map(function_of, each.of(ALL)))[function] for each in SLICES]
    fewest = max(1, CASES[function] // 4)
    assert set(counts) <= {fewest, fewest + 1}
    assert sum(counts) == max(4, CASES[function])


def test_a_function_without_parameters_is_in_each_slice() -> None:
    assert all(ALONE in each.of(ALL) for each in SLICES)


def test_neither_the_order_nor_other_functions_change_a_slice() -> None:
    alone = Slice(2, 4).of(node_ids("many"))
    assert alone == Slice(2, 4).of(reversed(ALL)) & set(node_ids("many"))


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

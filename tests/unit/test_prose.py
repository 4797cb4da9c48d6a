"""`make lint` refuses openings of docstrings, long lines of Markdown and second names of classes, on small trees."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "tools/prose.py"
LINK = f"[text](https://example.org/{'x' * 120})"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "kernels/norm").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Title\n")
    return tmp_path


def refused(tree: Path) -> list[str]:
    done = subprocess.run([sys.executable, CHECK, tree], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert done.returncode == bool(lines)
    return lines


@pytest.mark.parametrize(
    "word", ["Of", "Who", "Whose", "Those", "Where", "Until", "Whether", "From", "What", "How", "Which"]
)
def test_a_docstring_that_begins_with_such_a_word_is_refused(tree: Path, word: str) -> None:
    opening = f'"""{word} rows."""'
    source = f"{opening}\nclass A:\n    {opening}\n\n    async def f(self):\n        {opening}\n"
    (tree / "kernels/norm/gpu.py").write_text(source)
    assert [line.partition(": ")[0] for line in refused(tree)] == [f"kernels/norm/gpu.py:{line}" for line in (1, 3, 6)]


@pytest.mark.parametrize("word", ["The", "A", "An", "With", "Raises", "Returns"])
def test_a_docstring_of_a_function_says_what_it_does(tree: Path, word: str) -> None:
    opening = f'"""{word} rows."""'
    source = f"class A:\n    {opening}\n\n    def f(self):\n        {opening}\n"
    shown = f"\n    @cached_property\n    def g(self):\n        {opening}\n"
    (tree / "kernels/norm/gpu.py").write_text(source + shown)
    assert [line.partition(": ")[0] for line in refused(tree)] == ["kernels/norm/gpu.py:5"]


def test_docstrings_of_tests_may_begin_with_what_they_show_but_not_with_such_a_word(tree: Path) -> None:
    (tree / "tests").mkdir()
    functions = '\ndef f():\n    """The rows."""\n\ndef g():\n    """What rows."""\n'
    (tree / "tests/test_rows.py").write_text(f'"""How rows."""\n{functions}')
    assert [line.partition(": ")[0] for line in refused(tree)] == [f"tests/test_rows.py:{line}" for line in (1, 7)]


def test_other_docstrings_are_taken(tree: Path) -> None:
    (tree / "kernels/norm/gpu.py").write_text('"""Offers of blocks."""\n\ndef f():\n    """Return what is left."""\n')
    assert refused(tree) == []


@pytest.mark.parametrize(
    "line",
    [
        f"* {LINK}",
        f"```\n{'word ' * 30}\n```",
        f"| a | [b](https://example.org/{'x' * 300}) |",
        f"| {'x' * 160} | {'y' * 160} |",
        "word " * 23 + "words",
    ],
)
def test_lines_that_cannot_be_broken_or_need_not_be_are_taken(tree: Path, line: str) -> None:
    (tree / "kernels/page.md").write_text(line)
    assert refused(tree) == []


@pytest.mark.parametrize("line", ["word " * 25, f"see {LINK}", f"| {'x' * 161} | y |"])
def test_a_line_or_a_cell_that_is_too_long_is_refused(tree: Path, line: str) -> None:
    (tree / "kernels/page.md").write_text(f"# Title\n\n{line}\n")
    (finding,) = refused(tree)
    assert finding.startswith("kernels/page.md:3: ")


def test_a_class_name_that_comes_twice_is_refused(tree: Path) -> None:
    (tree / "engine").mkdir()
    (tree / "kernels/other").mkdir()
    for file in ("engine/plan.py", "kernels/norm/gpu.py", "kernels/other/gpu.py"):
        (tree / file).write_text("x = 1\n\n\nclass Plan:\n    pass\n")
    assert refused(tree) == [
        f"{file}:4: engine/plan.py has a class Plan, too: name one anew"
        for file in ("kernels/norm/gpu.py", "kernels/other/gpu.py")
    ]


def test_a_private_class_may_share_its_name_within_a_folder_and_with_other_packages(tree: Path) -> None:
    (tree / "engine").mkdir()
    (tree / "kernels/other").mkdir()
    for file in ("engine/plan.py", "kernels/norm/cpu.py", "kernels/norm/gpu.py", "kernels/other/cpu.py"):
        (tree / file).write_text("class _State:\n    pass\n")
    assert [line.partition(": ")[0] for line in refused(tree)] == ["kernels/other/cpu.py:1"]

"""Check the prose of docstrings and of Markdown pages, and the names of classes; a part of `make lint`.

* A docstring begins with a verb, a noun or a formula, never with a word of `OPENINGS`, not even in tests and tools. In
  the product, a function's docstring, unless it is a property, does not begin with a word of `NO_VERBS` either.
* A line of Markdown ends at column 120, except in tables and code blocks, and for a word or link that cannot be broken.
* A cell of a table has at most `CELL` characters, not counting the addresses of its links.
* Class names are unique. Private classes may share a name with one of another package, or of the same folder, where
  files do the same for different things (`_State` of each parser).

Prints one line for each finding, as `file:line: what is wrong`, and exits with 1 if there is any. The argument is the
root of the tree, by default this one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGES = ("cluster", "engine", "kernels", "kv_transfer")
BESIDE = ("tests", "tools")
OPENINGS = {"of", "who", "whose", "those", "where", "until", "whether", "from", "what", "how", "which"}
NO_VERBS = {"the", "a", "an", "with", "raises", "returns"}
WIDTH = 120
CELL = 160
OWN_LINK = re.compile(r"\]\([^)]*\)")
COLUMN = re.compile(r"(?<!\\)\|")


def openings(source: str, *, of_product: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the line and the first word of each docstring that begins with a word of `OPENINGS` or `NO_VERBS`.

    `NO_VERBS` apply to the product only.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = re.match(r"\W*(\w+)", ast.get_docstring(node) or "")
        if first and first[1].lower() in (OPENINGS | NO_VERBS if of_product and _acts(node) else OPENINGS):
            yield node.body[0].lineno, first[1]


def _acts(node: ast.AST) -> bool:
    """Return whether the node is a function other than a property."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any(ast.unparse(each).endswith("property") for each in node.decorator_list)


def long_lines(page: str) -> Iterator[tuple[int, str]]:
    """Yield line and reason for each line of prose, and each cell of a table, that is too long."""
    in_code = False
    for number, line in enumerate(page.splitlines(), 1):
        text = line.strip()
        if text.startswith("```"):
            in_code = not in_code
        elif in_code:
            continue
        elif text.startswith("|"):
            longest = max(len(cell.strip()) for cell in COLUMN.split(OWN_LINK.sub("]", text)))
            if longest > CELL:
                yield number, f"a table cell of {longest} characters: at most {CELL}, the rest belongs under the table"
        elif len(line) > WIDTH and len(re.sub(r"^([*+-]|\d+\.) ", "", text).split()) > 1:
            yield number, f"{len(line)} columns: at most {WIDTH}"


def python_files(root: Path, folders: Sequence[str] = PACKAGES) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def pages(root: Path) -> list[Path]:
    """Return README.md and every Markdown page of the docs, the packages and the configs."""
    folders = ("docs", "configs", "helm", *PACKAGES)
    return [root / "README.md", *sorted(path for folder in folders for path in (root / folder).rglob("*.md"))]


def classes(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each class at the top of a module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.lineno, node.name


def second_classes(root: Path) -> Iterator[tuple[Path, int, str, Path]]:
    """Yield file, line and name of each class whose name an earlier file uses, and that file."""
    first: defaultdict[str, list[Path]] = defaultdict(list)
    for path in python_files(root):
        for line, name in classes(path):
            others = [each for each in first[name] if not (name.startswith("_") and _may_share(root, path, each))]
            if others:
                yield path, line, name, others[0]
            first[name].append(path)


def _may_share(root: Path, one: Path, other: Path) -> bool:
    """Return whether two files may have private classes of the same name."""
    return one.parent == other.parent or one.relative_to(root).parts[0] != other.relative_to(root).parts[0]


def findings(root: Path) -> Iterator[str]:
    for path in python_files(root, PACKAGES + BESIDE):
        of_product = path.relative_to(root).parts[0] in PACKAGES
        for line, word in openings(path.read_text(), of_product=of_product):
            yield f'{path.relative_to(root)}:{line}: a docstring begins with "{word}": begin with a verb or a noun'
    for path, line, name, other in second_classes(root):
        yield f"{path.relative_to(root)}:{line}: {other.relative_to(root)} has a class {name}, too: name one anew"
    for path in pages(root):
        for line, reason in long_lines(path.read_text()):
            yield f"{path.relative_to(root)}:{line}: {reason}"


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    found = list(findings(root))
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

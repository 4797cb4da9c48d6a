"""Tests lie where README.md says, and share code by importing it relatively."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from .. import ROOT

TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
# What the files of a folder may import besides its own. Hosts carry whole clusters, and chaos hurts these.
SEEN_BY = {
    "helpers": set[str](),
    "unit": {"helpers"},
    "sockets": {"helpers"},
    "cluster": {"helpers"},
    "hosts": {"helpers"},
    "chaos": {"helpers", "hosts"},
}
PLANTS_BUGS = TESTS / "unit/kv_transfer/test_handoff_planted_bugs.py"  # inside of what it tests


@functools.cache
def names_in(file: Path) -> tuple[list[str], list[str]]:
    """Return the full names of the modules that a file imports and of what it takes from them, and what it replaces."""
    package = file.relative_to(ROOT).parent.parts
    text = file.read_text()
    tree = ast.parse(text)
    imported = []
    for node in statements(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            imported += [f"{module}.{alias.name}" for alias in node.names]
    return imported, [*replaced(tree)] if "setattr" in text else []


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all statements: looking into their expressions, too, would take most of the time."""
    unseen: list[ast.AST] = [tree]
    while unseen:
        node = unseen.pop()
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            unseen += getattr(node, part, [])
        yield node


def replaced(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                yield name


def private_names(file: Path) -> Iterator[str]:
    """Yield each name of ours with a leading underscore that the file imports, or replaces by `setattr`.

    Other accesses are ruff's to find (SLF001).
    """
    imported, replaced = names_in(file)
    for name in imported:
        if name.startswith("baton.") and any(part.startswith("_") for part in name.split(".")):
            yield name
    yield from (name for name in replaced if name.startswith("_") and not name.startswith("__"))


def test_every_folder_is_a_package() -> None:
    assert [file for file in FILES if not (file.parent / "__init__.py").exists()] == []


def test_the_folders_are_those_that_the_page_describes() -> None:
    assert {file.relative_to(TESTS).parts[0] for file in FILES if file.parent != TESTS} == set(SEEN_BY)
    page = (TESTS / "README.md").read_text()
    assert [folder for folder in SEEN_BY if f"`{folder}/`" not in page] == []


@pytest.mark.parametrize("folder", SEEN_BY)
def test_a_folder_imports_no_test_and_only_what_it_may_see(folder: str) -> None:
    seen = {"ROOT", folder, *SEEN_BY[folder]}
    names = [(str(file), name) for file in (TESTS / folder).rglob("*.py") for name in names_in(file)[0]]
    ours = [(file, name.split(".")[1:]) for file, name in names if name.startswith("tests.")]
    assert [(file, parts) for file, parts in ours if parts[0] not in seen] == []
    assert [(file, parts) for file, parts in ours if any(part.startswith("test_") for part in parts)] == []


def test_no_file_changes_the_path_of_modules() -> None:
    changed = "sys" + ".path"
    assert [str(file) for file in FILES if changed in file.read_text()] == []


def test_no_file_imports_or_replaces_what_our_modules_keep_private() -> None:
    found = {str(file.relative_to(TESTS)): sorted(set(private_names(file))) for file in FILES if file != PLANTS_BUGS}
    assert {file: names for file, names in found.items() if names} == {}

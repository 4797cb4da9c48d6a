"""A wheel holds and asks for what the tree holds and imports."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cluster", "engine", "kernels", "kv_transfer")


def test_every_package_of_the_tree_is_in_the_wheel() -> None:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        "baton." + ".".join(init.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for init in (ROOT / package).rglob("__init__.py")
    }
    assert set(described["packages"]) == found
    assert described["package-dir"] == {f"baton.{package}": package for package in PACKAGES}


def test_every_data_file_of_the_tree_is_in_the_wheel() -> None:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {
        path
        for package, patterns in described.items()
        for pattern in patterns
        for path in (ROOT / package.removeprefix("baton.").replace(".", "/")).glob(pattern)
    }
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    assert {path for path in files if path.suffix not in (".py", ".pyc", ".md")} == shipped


def test_no_code_lies_in_a_folder_that_is_no_package() -> None:
    stray = [
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert stray == []


NOT_IMPORTED = {"tiktoken"}  # by our code: transformers reads the tokenizer of Kimi Linear with it
DISTRIBUTIONS = {"zmq": "pyzmq", "yaml": "pyyaml", "ucxx": "ucxx_cu13", "opentelemetry": "opentelemetry_sdk"}


def imported_by_the_packages() -> Iterator[str]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    yield from (alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    yield node.module


def test_dependencies_are_what_the_packages_import() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] + project["optional-dependencies"]["ucx"]
    names = {re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in listed}
    modules = {name.partition(".")[0] for name in imported_by_the_packages()} - {"baton", *sys.stdlib_module_names}
    assert {DISTRIBUTIONS.get(name, name) for name in modules} | NOT_IMPORTED == names


@pytest.mark.parametrize("name", ["model", "hybrid"])
def test_the_demo_models_are_small_enough_to_ship(name: str) -> None:
    assert sum(file.stat().st_size for file in (ROOT / "configs/demo" / name).iterdir()) <= 16_000_000

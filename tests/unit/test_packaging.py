"""What a wheel would hold is what the tree holds."""

import tomllib
from pathlib import Path

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


def test_no_code_lies_in_a_folder_that_is_no_package() -> None:
    stray = [
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert stray == []

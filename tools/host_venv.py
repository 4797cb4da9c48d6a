"""Make a virtual environment of the packages that this Python finds, for hosts without a network.

`make test-gpu OFFLINE=1` calls it. Nothing is installed: the environment refers to the folders on this Python's path
(`PYTHONPATH` among them), and to this checkout.

    python tools/host_venv.py .venv
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from site import getsitepackages
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
FOLDERS = ("cluster", "engine", "kernels", "kv_transfer")
PATHS = "host.pth"
TESTS_NEED = ("pytest", "pytest-timeout", "pytest-asyncio", "pytest-xdist", "hypothesis")


def find_missing(names: Iterable[str]) -> list[str]:
    """Return the packages that this Python does not find."""
    missing = []
    for name in names:
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    return missing


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    return table


def requirements() -> Iterator[str]:
    """Yield the names of the packages that Baton imports."""
    for requirement in project()["dependencies"]:
        yield re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def make(folder: Path) -> None:
    """Create the environment, with a `baton` command in it."""
    packages = folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    metadata = packages / f"baton-{project()['version']}.dist-info"
    if packages.exists() and any(each.name not in (PATHS, metadata.name) for each in packages.iterdir()):
        sys.exit(f"{folder} has packages of its own, which the tests can use without OFFLINE=1; or remove it")
    venv.EnvBuilder(with_pip=False).create(folder)
    namespace = CHECKOUT / "build/namespace"
    (namespace / "baton").mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        link = namespace / "baton" / name
        link.unlink(missing_ok=True)
        link.symlink_to(CHECKOUT / name)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(Path(each).absolute()) for each in (*given, *getsitepackages()) if each]
    (packages / PATHS).write_text("\n".join([str(namespace), *paths]) + "\n")
    metadata.mkdir(exist_ok=True)  # with which Baton finds its version
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: baton\nVersion: {project()['version']}\n")
    command = folder / "bin/baton"
    python = folder.absolute() / "bin/python"
    command.write_text(f"#!{python}\nimport sys\n\nfrom baton.cluster.cli.main import main\n\nsys.exit(main())\n")
    command.chmod(0o755)


if __name__ == "__main__":
    if absent := find_missing(TESTS_NEED):
        sys.exit(f"{sys.executable} does not find {', '.join(absent)}: put them on its path, by PYTHONPATH for example")
    if absent := find_missing(requirements()):
        print(f"{sys.executable} does not find {', '.join(absent)}: tests that import them will fail")
    make(Path(sys.argv[1]))

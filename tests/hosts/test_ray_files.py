"""configs/ray for clouds: Ray accepts the files, and they start the machines that the application needs."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from .ray_hosts import BIN, CHECKOUT

FILES = sorted((CHECKOUT / "configs/ray").glob("*.yaml"))
CLOUDS = [file for file in FILES if yaml.safe_load(file.read_text())["provider"]["type"] != "local"]
ids = {"ids": lambda file: file.stem}


def commands_of(config: dict[str, Any]) -> list[str]:
    return [command for key, commands in config.items() if key.endswith("_commands") for command in commands]


def test_there_is_a_file_for_each_kind_of_place() -> None:
    assert {"aws", "gcp", "on-prem"} <= {file.stem for file in FILES}
    assert [file.stem for file in CLOUDS] == ["aws", "gcp"]


@pytest.mark.parametrize("file", CLOUDS, **ids)
def test_ray_takes_the_file_of_a_cloud(file: Path) -> None:
    config = prepare_config(yaml.safe_load(file.read_text()))
    validate_config(config)
    assert f"ray up configs/ray/{file.name}" in file.read_text()


@pytest.mark.parametrize("file", CLOUDS, **ids)
def test_the_machines_of_a_cloud_are_those_that_the_application_asks_for(file: Path) -> None:
    """prefill_decode.yaml has as many nodes as `baton plan` counts, and the fleets' markers on machines with GPUs."""
    config = yaml.safe_load(file.read_text())
    (served,) = set(re.findall(r"configs/serve/(\w+)\.yaml", file.read_text()))
    (application,) = yaml.safe_load((CHECKOUT / f"configs/serve/{served}.yaml").read_text())["applications"]
    types = config["available_node_types"]
    for role, fleet in application["args"]["fleets"].items():
        (marker,) = fleet["resources"]
        (kind,) = [kind for kind in types.values() if marker in kind["resources"]]
        ranks = fleet["replicas"] * fleet["engine"]["tensor_parallel_size"]
        assert kind["min_workers"] == kind["max_workers"] == ranks / 8, role
    workers = [kind for name, kind in types.items() if name != config["head_node_type"]]
    assert config["max_workers"] == sum(kind["max_workers"] for kind in workers)


@pytest.fixture(scope="module")
def start_options() -> str:
    """Return the options that `ray start --help` lists."""
    asked = subprocess.run([BIN / "ray", "start", "--help"], capture_output=True, text=True, check=True, timeout=60)
    return asked.stdout


@pytest.mark.parametrize("file", FILES, **ids)
def test_machines_start_with_the_token_without_niceness_and_with_options_of_rays(
    file: Path, start_options: str
) -> None:
    config = yaml.safe_load(file.read_text())
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    starts = [command for command in commands_of(config) if "ray start" in command]
    assert len(starts) == 2, "a head and a worker"
    for command in starts:
        assert command.startswith("RAY_AUTH_MODE=token RAY_worker_niceness=0 ")
        for option in re.findall(r"(--[a-z-]+)", command.partition("ray start")[2]):
            assert re.search(rf"{option}\s", start_options), option


@pytest.mark.parametrize("file", FILES, **ids)
def test_machines_get_the_packages_and_configs_and_nothing_else_of_a_checkout(file: Path) -> None:
    """Ray reads all that it copies before it starts a machine: an environment has gigabytes."""
    mounts = yaml.safe_load(file.read_text())["file_mounts"]
    copied = {remote: local for remote, local in mounts.items() if remote.startswith("~/baton")}
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["package-dir"].values()
    needed = {"pyproject.toml", project["project"]["readme"], "configs", *packages}
    assert copied == {f"~/baton/{name}": name for name in needed}


@pytest.mark.parametrize("file", FILES, **ids)
def test_ray_down_finds_ray_on_the_machines(file: Path) -> None:
    config = yaml.safe_load(file.read_text())
    assert any("PATH=~/baton/.venv/bin:$PATH' >> ~/.bashrc" in command for command in config["setup_commands"])

"""Commands, YAML and Python in the documentation are what Baton takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ray.scripts import scripts as ray_scripts
from ray.serve import scripts as serve_scripts

from baton.cluster.cli.eval import eval_app
from baton.cluster.cli.main import app as baton_app
from baton.cluster.spec.files import load_specs
from baton.engine.config import EngineConfig

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "configs", "helm", "cluster", "engine", "kernels", "kv_transfer")
PAGES = [ROOT / "README.md", *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
DEMO = str(ROOT / "configs/demo/model")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    """Return the blocks of code of one language in all pages, each with its page's name."""
    found = [(page, match) for page in PAGES for match in FENCE.finditer(page.read_text())]
    return [(str(page.relative_to(ROOT)), match[3]) for page, match in found if match[2] == language]


def typed() -> Iterator[tuple[str, str]]:
    """Yield each page's name with every line of its blocks, and every span between backticks outside them."""
    for page in PAGES:
        text, name = page.read_text(), str(page.relative_to(ROOT))
        for match in FENCE.finditer(text):
            yield from ((name, line) for line in match[3].replace("\\\n", " ").splitlines())
        yield from ((name, " ".join(span.split())) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text)))


def command_lines(program: str) -> list[tuple[str, str]]:
    """Return what runs `program`, without variables in front and comments behind."""
    pattern = rf"(?:\w+=\S+ )*(?:chrt -r 10 )?(?:\.venv/bin/)?({program} [a-z][a-z-]*(?: .*)?)$"
    found = [(page, re.match(pattern, words.partition(" #")[0].strip())) for page, words in typed()]
    return [(page, match[1]) for page, match in found if match]


def subcommands(program: str) -> dict[str, Any]:
    match program:
        case "ray":
            return dict(ray_scripts.cli.commands)
        case "serve":
            return dict(serve_scripts.cli.commands)
    own = typer.main.get_command(baton_app)
    return {**own.commands, "eval": typer.main.get_command(eval_app)}  # type: ignore[attr-defined]


@pytest.mark.parametrize("program", ["ray", "serve", "baton"])
def test_commands_exist_and_take_the_options_that_are_named(program: str) -> None:
    lines = command_lines(program)
    assert lines
    assert [(page, line, fault) for page, line in lines if (fault := fault_of(program, line))] == []


def fault_of(program: str, line: str) -> str | None:
    """Return what such a command would refuse: a subcommand or an option that does not exist."""
    words = re.split(r"\s+", re.sub(r"[\[\]|]", " ", line.partition("|")[0]).strip())[1:]
    command: Any = None
    known = subcommands(program)
    while known and words and re.fullmatch("[a-z][a-z-]+", words[0]):
        name = words.pop(0)
        if name not in known:
            return f"no command {name}"
        command = known[name]
        known = getattr(command, "commands", {})
    options = {option for param in command.params for option in [*param.opts, *param.secondary_opts]} | {"--help"}
    if (command.context_settings or {}).get("ignore_unknown_options"):
        engine = {name.replace("_", "-") for name in EngineConfig.model_fields}
        options |= {f"--{prefix}{name}" for name in engine for prefix in ("", "no-")}
    given = {word.partition("=")[0].rstrip(",;.") for word in words if word.startswith("--")}
    unknown = sorted(given - options)
    return f"no options {unknown}" if unknown else None


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {(page, line.split()[1]) for page, line in command_lines("make")}
    assert named
    assert {(page, target) for page, target in named if target not in targets} == set()


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_yaml_is_a_config_that_is_taken(page: str, text: str) -> None:
    """In a block, `{...}` stands for settings that are left out."""
    content = yaml.safe_load(text.replace("{...}", "{}"))
    if "deployments" in content:
        file = yaml.safe_load((ROOT / "configs/serve/demo.yaml").read_text())
        file["applications"][0] |= content
        content = file
    assert load_specs(content, model=DEMO, needs_model=False)


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_python_parses(page: str, text: str) -> None:
    compile(text, page, "exec")


@pytest.mark.parametrize(("page", "text"), blocks("sh"))
def test_files_in_commands_exist(page: str, text: str) -> None:
    named = [
        word
        for line in text.replace("\\\n", " ").splitlines()
        for word in shlex.split(line, comments=True)
        if re.match(r"(configs|helm|tests|docs|tools|kernels|engine)/", word)
    ]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_such_faults_are_found() -> None:
    assert fault_of("baton", "baton bench throughput MODEL --num-prompts 3 --max-num-seqs 4") is None
    assert fault_of("baton", "baton bench thruput MODEL") == "no command thruput"
    assert fault_of("baton", "baton status --jason") == "no options ['--jason']"
    assert fault_of("serve", "serve deploy FILE --wait") == "no options ['--wait']"

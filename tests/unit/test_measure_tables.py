"""The measurement of the documentation's tables, with stand-ins for engines, servers and the client."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..helpers.peers import CLIENT, ENGINE, SERVER

TOOL = Path(__file__).parents[2] / "tools" / "measure_tables.py"
# Engines note when they are ready and when they work.
NOTED = """
from pathlib import Path as _Path

def _note(self, what):
    with (self.folder.parent / "notes").open("a") as notes:
        notes.write(f"{what} {self.folder.name} {__name__}\\n")

_init, _generate = LLM.__init__, LLM.generate

def _noted_init(self, model, **options):
    _init(self, model, **options)
    _note(self, "ready")

def _noted_generate(self, *given, **named):
    _note(self, "works")
    return _generate(self, *given, **named)

LLM.__init__, LLM.generate = _noted_init, _noted_generate
drafting = SimpleNamespace(observe=lambda *step, **reads: None)

def _with_steps(self, prompts, params, use_tqdm):  # a plain one, and one with drafts and guesses
    drafting.observe(4, 0, 0, 0.005, 0, reads_late=False)
    drafting.observe(4, 12, 0, 0.010, 3, reads_late=False)
    return _noted_generate(self, prompts, params, use_tqdm)

LLM.generate = _with_steps
LLM.engine = property(lambda self: SimpleNamespace(core=SimpleNamespace(
    scheduler=SimpleNamespace(drafting=drafting), stats=lambda: SimpleNamespace(
        speculation=SimpleNamespace(num_drafts=self.drafts, num_accepted_tokens=2 * self.drafts)))))
"""


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    folder = tmp_path / "peers"
    for engine in (folder / "vllm" / "__init__.py", folder / "baton" / "engine" / "__init__.py"):
        engine.parent.mkdir(parents=True)
        engine.write_text(ENGINE + NOTED)
    (folder / "vllm" / "benchmarks").mkdir()
    (folder / "vllm" / "benchmarks" / "serve.py").write_text(CLIENT)
    (folder / "server.py").write_text(SERVER)
    return folder


def run(folder: Path, peers: Path, *words: str) -> None:
    server = f"{sys.executable} {peers / 'server.py'}"
    given = ["--vllm-path", str(peers), "--baton-path", str(peers), "--vllm", server, "--baton", server]
    done = subprocess.run([sys.executable, TOOL, folder, *words, *given], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_engines_that_fit_start_together_and_work_one_after_the_other(tmp_path: Path, peers: Path) -> None:
    folder = tmp_path / "out"
    run(folder, peers, "--tables", "fp8", "drafts", "--gpu-gib", "160", "--meanwhile", f"touch {tmp_path}/ran")
    assert (tmp_path / "ran").exists()
    found = [(row["engine"], row["model"], row["work"]) for row in rows(folder / "engines.jsonl")]
    drafted = [(name, "drafts") for name in ("qwen3-next-8-mtp", "qwen3-8b-32k", "qwen3-8b")]
    models = [("qwen3-8b-fp8", "standard"), *drafted]
    assert found == [(side, *model) for side in ("vllm", "baton") for model in models]
    assert not any("failed" in row for row in rows(folder / "engines.jsonl"))
    steps = [row.get("drafted_8_steps") for row in rows(folder / "engines.jsonl") if row["engine"] == "baton"]
    assert steps == [None] + [{"plain": [3, 5.0], "drafts + guesses": [3, 10.0]}] * 3
    notes = [line.split() for line in (folder / "notes").read_text().splitlines()]
    turns = [
        dict.fromkeys((what, model) for what, model, of in notes if of == side) for side in ("vllm", "baton.engine")
    ]
    for turn in turns:
        assert {what for what, _ in list(turn)[: len(models)]} == {"ready"}
        assert [model for what, model in turn if what == "works"] == [model for model, _ in models]
    options = json.loads((folder / "qwen3-8b" / "options").read_text())
    assert options["speculative_config"]["model"] == str(folder / "qwen3-0.6b")
    assert "rejection_sample_method" not in options["speculative_config"], "Baton came last"


@pytest.mark.slow
def test_engines_that_do_not_fit_start_later(tmp_path: Path, peers: Path) -> None:
    folder = tmp_path / "out"
    run(folder, peers, "--tables", "fp8", "drafts", "--gpu-gib", "80", "--sides", "vllm")
    notes = [line.split() for line in (folder / "notes").read_text().splitlines()]
    first = list(dict.fromkeys((what, model) for what, model, _ in notes))
    assert first.index(("works", "qwen3-next-8-mtp")) < first.index(("ready", "qwen3-8b"))


@pytest.mark.slow
def test_pairs_are_measured_over_http(tmp_path: Path, peers: Path) -> None:
    folder = tmp_path / "out"
    run(folder, peers, "--tables", "pairs", "--gpu-gib", "200")
    found = {(row["model"], row["server"]) for row in rows(folder / "servers.jsonl")}
    assert found == {(model, f"{side}-pd") for model in ("qwen3-0.6b", "qwen3-8b") for side in ("vllm", "baton")}
    cells = [(row["length"], row["clients"]) for row in rows(folder / "servers.jsonl")]
    assert cells.count(("1024/128", 256)) == 4
    assert len(cells) == 4 * 9

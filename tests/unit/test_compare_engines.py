"""The comparison of engines, with one in the place of vLLM whose times are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..helpers.peers import ENGINE

TOOL = Path(__file__).parents[2] / "tools" / "compare_engines.py"


class Bench:
    """A folder with models, and the tool."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "results.jsonl"
        (folder / "vllm.py").write_text(ENGINE)

    def model(self, name: str, dies: str = "") -> Path:
        folder = self.folder / name
        folder.mkdir()
        (folder / "config.json").write_text('{"vocab_size": 1000}')
        if dies:
            (folder / "dies").write_text(dies)
        return folder

    def run(self, *words: object) -> list[dict[str, Any]]:
        """Return the rows that a comparison adds."""
        before = len(self.rows())
        given = ["--engines", "vllm", "--vllm-path", self.folder, "--out", self.out]
        command = [sys.executable, TOOL, *words, *given]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return self.rows()[before:]

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()] if self.out.exists() else []

    def table(self) -> dict[str, list[str]]:
        """Return the cells of each row, by their name."""
        done = subprocess.run([sys.executable, TOOL, "--table", self.out], capture_output=True, text=True, timeout=60)
        lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
        return {cells[0].strip(): cells[1:] for cells in lines}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.slow
def test_figures_are_those_of_the_engine(bench: Bench) -> None:
    model = bench.model("m-0.6b")
    (row,) = bench.run(model, "--vllm", '{"block_size": 32}', "--kv-cache-dtype", "fp8")
    rates = {name: row.pop(name) for name in list(row) if name.endswith("tok_s")}
    assert row == {
        "model": "m-0.6b",
        "engine": "vllm",
        "work": "standard",
        "start_s": 30.0,
        "decode_1x128_ms": pytest.approx(5.0),
        "decode_64x1024_ms": pytest.approx(5.0),
        "decode_256x1024_ms": pytest.approx(5.0),
        "ttft_128_ms": pytest.approx(6.28),
    }
    assert rates.pop("mixed_tok_s") > 0
    assert set(rates) == {"prefill_16x4096_tok_s", "prefill_2x32768_tok_s"}
    assert list(rates.values()) == pytest.approx([65536 / 0.66036] * 2)
    options = json.loads((model / "options").read_text())
    assert options["block_size"] == 32
    assert options["kv_cache_dtype"] == "fp8"
    assert options["max_model_len"] == 40960


@pytest.mark.slow
def test_drafts_are_counted_and_each_engine_gets_its_memory(bench: Bench) -> None:
    models = bench.model("a"), bench.model("b")
    rows = bench.run(*models, "--work", "drafts", "--together", "--kv-gib", 1, 2)
    assert [row["model"] for row in rows] == ["a", "b"]
    for row in rows:
        for batch in (1, 8, 64):
            assert row[f"drafted_{batch}_tok_s"] == pytest.approx(batch / 5e-3)
            assert row[f"drafted_{batch}_length"] == 3
    options = [json.loads((model / "options").read_text()) for model in models]
    assert [each["kv_cache_memory_bytes"] for each in options] == [1 << 30, 2 << 30]
    assert not any(each["disable_log_stats"] for each in options), "the counts come from them"


@pytest.mark.slow
def test_drafts_are_measured_at_any_batch_sizes(bench: Bench) -> None:
    model = bench.model("m")
    (row,) = bench.run(model, "--work", "drafts", "--batch-sizes", 2, 256)
    assert [name for name in row if name.endswith("tok_s")] == ["drafted_2_tok_s", "drafted_256_tok_s"]
    assert json.loads((model / "options").read_text())["max_num_seqs"] == 256, "all of them run at once"


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["at the start", "at work"])
def test_an_engine_that_dies_is_a_row_and_the_next_one_is_measured(bench: Bench, dies: str) -> None:
    dead, alive = bench.run(bench.model("dead", dies), bench.model("alive"), "--work", "drafts")
    assert dead == {"model": "dead", "engine": "vllm", "work": "drafts", "failed": True}
    assert alive["drafted_1_length"] == 3


@pytest.mark.slow
def test_an_engine_that_dies_while_another_is_measured_is_a_row(bench: Bench) -> None:
    models = bench.model("first", "after another"), bench.model("other", "while another is measured")
    rows = bench.run(*models, bench.model("last"), "--work", "drafts", "--together")
    assert ["failed" in row for row in rows] == [False, True, False]


def test_a_table_has_all_work_of_a_model_and_ratios_above_one_are_for_baton(bench: Bench) -> None:
    rows = [
        {"model": "m", "engine": "baton", "work": "standard", "ttft_128_ms": 10.0, "mixed_tok_s": 43210.9},
        {"model": "m", "engine": "vllm", "work": "standard", "ttft_128_ms": 20.0, "mixed_tok_s": 21605.45},
        {"model": "m", "engine": "baton", "work": "drafts", "drafted_1_length": 3.0},
        {"model": "m", "engine": "vllm", "work": "drafts", "failed": True},
    ]
    bench.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {name: cells for name, cells in bench.table().items() if "_" in name} == {
        "ttft_128_ms": ["10", "20", "2"],
        "mixed_tok_s": ["43,211", "21,605", "2"],
        "drafted_1_length": ["3", "-", "-"],
    }

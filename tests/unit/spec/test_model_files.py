"""Damaged model folders: `baton check` and `baton serve` name the damage before anything starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from baton.cluster.cli import serve
from baton.cluster.cli.main import app
from baton.cluster.cli.processes import Process, descendants, kill
from baton.cluster.planning.model_checks import WeightsCheck
from baton.cluster.spec import InvalidSpec
from baton.engine.hf_config.errors import ModelNotFetched
from baton.engine.hf_config.hub import Files, model_folder

from ...helpers.kept_logging import kept_logging

DEMO = Path(__file__).parents[3] / "configs/demo/model"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LAST, NORM = "model-00002-of-00002.safetensors", "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write the demo model in two files, with an index."""
    copy = tmp_path / "model"
    shutil.copytree(DEMO, copy)
    tensors = load_file(copy / WEIGHTS)
    (copy / WEIGHTS).unlink()
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, copy / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (copy / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return copy


def application(folder: Path, engine: str = "{}") -> Path:
    file = folder.parent / "application.yaml"
    file.write_text(f"model: {folder}\nfleets: {{unified: {{}}}}\nengine: {engine}\n")
    return file


def baton(*words: object) -> Result:
    with kept_logging():
        return CliRunner().invoke(app, list(map(str, words)))


def test_draft_layers_and_draft_models_that_are_not_there_are_refused(tmp_path: Path) -> None:
    hybrid, empty = tmp_path / "hybrid", tmp_path / "empty"
    shutil.copytree(DEMO.parent / "hybrid", hybrid)
    config = json.loads((hybrid / "config.json").read_text())
    (hybrid / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    shutil.copytree(DEMO, empty, ignore=shutil.ignore_patterns("*.safetensors"))
    assert baton("check", application(hybrid)).exit_code == 0
    for speculation, problem in (
        ("{method: mtp}", "'mtp' needs draft layers, and there are no tensors mtp.*"),
        (
            f"{{model: {empty}, num_speculative_tokens: 2}}",
            f"speculative_config.model: {empty}: no *.safetensors files",
        ),
    ):
        refused = baton("check", application(hybrid, f"{{speculative_config: {speculation}}}"))
        assert refused.exit_code == 1
        assert problem in " ".join(refused.output.split())


def cut_off(file: Path, size: int) -> None:
    with file.open("r+b") as stream:
        stream.truncate(size)


def link_nowhere(file: Path) -> None:
    file.unlink()
    file.symlink_to("../../blobs/0a1b2c")


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / LAST)
    del tensors[NORM]
    save_file(tensors, folder / LAST)


def without_index(folder: Path, name: str) -> None:
    (folder / INDEX).unlink()
    (folder / name).unlink()


def as_bin(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK")


NOWHERE = "(a link to ../../blobs/0a1b2c, where nothing is)"
AGAIN = "hf download NAME --local-dir FOLDER"
DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a file is missing": (lambda folder: (folder / LAST).unlink(), [INDEX, LAST, AGAIN]),
    "a file of several is missing": (lambda folder: without_index(folder, LAST), ["not there: ", LAST, AGAIN]),
    "a file is cut off": (lambda folder: cut_off(folder / LAST, 100_000), [LAST, "is cut off: tensor", AGAIN]),
    "a header is cut off": (lambda folder: cut_off(folder / LAST, 100), [LAST, "cut off in its header", AGAIN]),
    "a file is empty": (lambda folder: cut_off(folder / LAST, 0), [LAST, "(0 bytes)", AGAIN]),
    "a link leads nowhere": (lambda folder: link_nowhere(folder / LAST), [LAST, NOWHERE, AGAIN]),
    "the index's link leads nowhere": (lambda folder: link_nowhere(folder / INDEX), [INDEX, NOWHERE, AGAIN]),
    "the config's link leads nowhere": (lambda folder: link_nowhere(folder / "config.json"), ["config.json", NOWHERE]),
    "the weights are of another kind": (as_bin, ["pytorch_model.bin", "convert it to safetensors"]),
    "there is no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ["holds no tokenizer.json", AGAIN]),
    "the tokenizer's link leads nowhere": (
        lambda folder: link_nowhere(folder / "tokenizer.json"),
        ["tokenizer.json", NOWHERE, AGAIN],
    ),
    "the chat template's link leads nowhere": (
        lambda folder: link_nowhere(folder / "tokenizer_config.json"),
        ["tokenizer_config.json", NOWHERE, AGAIN],
    ),
    "the tokenizer is cut off": (lambda folder: cut_off(folder / "tokenizer.json", 1000), ["is not a tokenizer"]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_is_reported_before_anything_starts(
    folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(serve, "run", lambda *given, **_: started.append(given) or 0)
    do, told = DAMAGES[damage]
    do(folder)
    file = application(folder)
    checked, served = baton("check", file), baton("serve", "--config", file)
    assert (checked.exit_code, served.exit_code, started) == (1, 2, [])
    for output in (checked.output, served.output):
        flat = " ".join(output.replace("│", " ").split())
        assert all(words in flat for words in told), flat
        assert "Traceback" not in output


def test_a_separate_process_checks_the_tensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`baton serve` starts Ray at the same time, and deploys nothing before the check has ended."""
    started: list[Path] = []
    monkeypatch.setattr(serve, "run", lambda *_, unchecked_weights: started.append(unchecked_weights) or 0)
    without_a_tensor(folder)
    checked, served = baton("check", application(folder)), baton("serve", "--config", application(folder))
    assert (checked.exit_code, served.exit_code, started) == (1, 0, [folder])
    with WeightsCheck(folder) as check, pytest.raises(InvalidSpec) as refused:
        check.wait(threading.Event())
    for told in (" ".join(checked.output.split()), str(refused.value)):
        assert "1 missing: " in told
        assert f"{NORM} (of {LAST})" in told
        assert AGAIN in told


def _checks_weights(process: Process) -> bool:
    """Return whether a process is that of a `WeightsCheck`: other tests may have left child processes, too."""
    command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    return WeightsCheck.__module__.encode() in command


def test_a_hanging_check_of_weights_does_not_delay_a_stop(folder: Path) -> None:
    stop = threading.Event()
    stop.set()
    with WeightsCheck(folder) as check:
        begun = [process for process in descendants(os.getpid()) if _checks_weights(process)]
        assert begun
        for process in begun:
            os.kill(process.pid, signal.SIGSTOP)
        check.wait(stop)
    assert not [process for process in begun if process.alive()]


def test_a_killed_check_of_weights_is_an_error(folder: Path) -> None:
    with WeightsCheck(folder) as check:
        kill(filter(_checks_weights, descendants(os.getpid())))
        with pytest.raises(RuntimeError, match="exit code -9"):
            check.wait(threading.Event())


def test_the_code_that_runs_before_ray_imports_no_torch() -> None:
    code = (
        "import sys; from baton.cluster.cli.options import ServeOptions; from baton.cluster.cli import main, serve;"
        "from baton.cluster.planning.model_checks import check_headers, check_model;"
        "_, spec = serve.application_spec(ServeOptions(model=sys.argv[1]), {});"
        "check_model(spec); check_headers(spec, with_weights=serve.reads_weights(spec, None));"
        "print([name for name in ('torch', 'transformers', 'numpy', 'ray', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, DEMO], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["[]"]


def test_a_complete_folder_passes_and_no_tensor_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(serve, "run", lambda *given, **_: started.append(given) or 0)
    for file in folder.glob("*.safetensors"):
        header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        size = file.stat().st_size
        cut_off(file, header_bytes)
        cut_off(file, size)  # fill the file with zeros
    done = baton("check", application(folder))
    assert (done.exit_code, "is fine" in done.output) == (0, True), done.output
    assert baton("serve", "--config", application(folder)).exit_code == 0
    assert len(started) == 1
    with WeightsCheck(folder) as check:
        check.wait(threading.Event())


def test_dummy_weights_need_no_weight_files(folder: Path) -> None:
    as_bin(folder)
    assert baton("check", application(folder, "{load_format: dummy}")).exit_code == 0


def test_two_problems_are_reported_at_once(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    without_a_tensor(folder)
    output = baton("check", application(folder)).output
    assert NORM in output
    assert "tokenizer.json" in output


def test_without_weights_the_other_checks_still_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    done = baton("check", application(folder))
    assert done.exit_code == 0
    assert "not checked: the weights and the tokenizer of" in " ".join(done.output.split())
    monkeypatch.setattr(serve, "run", lambda *_, **__: pytest.fail("the application must not start"))
    served = baton("serve", "--config", application(folder))
    assert served.exit_code == 2
    assert "no *.safetensors files" in " ".join(served.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("{kv_cache_memory_bytes: 10}", "kv_cache_memory_bytes: 10 bytes hold 0 tokens"),
        ("{kv_cache_memory_bytes: 500000, max_model_len: 256}", "kv_cache_memory_bytes: 500000 bytes hold 160"),
        ("{num_gpu_blocks_override: 3, max_model_len: 256}", "num_gpu_blocks_override: 3 blocks hold 48 tokens"),
    ],
)
def test_too_little_memory_for_a_sequence_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str, said: str
) -> None:
    monkeypatch.setattr(serve, "run", lambda *_, **__: pytest.fail("the application must not start"))
    (tmp_path / "model").symlink_to(DEMO)
    file = application(tmp_path / "model", engine)
    for words, code in ((("check", file), 1), (("serve", "--config", file), 2), (("plan", file), 1)):
        done = baton(*words)
        assert done.exit_code == code
        assert f"unified: {said}" in done.output


@pytest.mark.parametrize("name", ["model", "hybrid"])
def test_a_tier_without_room_for_a_block_of_each_cache_group_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "application.yaml"
    tiers = "{host_bytes: 10, disk_path: /kv, disk_bytes: 20}"
    file.write_text(f"model: {DEMO.parent / name}\nfleets: {{unified: {{kv_tiers: {tiers}}}}}\n")
    done = baton("check", file)
    assert done.exit_code == 1
    for setting in ("host_bytes is 10", "disk_bytes is 20"):
        assert f"unified: kv_tiers.{setting}, which has no block for " in done.output


@pytest.mark.parametrize("address", ["s3://bucket/model", "gs://bucket/a/model", "file:///models/qwen"])
def test_an_address_of_an_object_store_is_refused_with_what_to_do(tmp_path: Path, address: str) -> None:
    file = tmp_path / "app.yaml"
    file.write_text(f"model: {address}\nfleets: {{unified: {{}}}}\n")
    for words in (["serve", address], ["serve", "--config", str(file)], ["plan", str(file)], ["check", str(file)]):
        done = baton(*words)
        assert done.exit_code != 0
        assert f"{address!r} is an address" in done.output
        assert "mount the bucket, or copy the model to a folder" in done.output
    with pytest.raises(ModelNotFetched, match="is an address"):
        model_folder(address, Files.TEXT)

"""Options are those of the nearest measurement, or the default if there is none."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from baton.kernels import tuned

H200 = torch.device("cuda", 0)
DEFAULT = {"BLOCK": 1, "num_warps": 4}

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return a function that writes measurements `(key, BLOCK)` of the op "op", as on an H200 with Triton 3.6."""
    monkeypatch.setattr(tuned, "LIBRARY", tmp_path)
    monkeypatch.setattr(tuned, "device_name", lambda device: "NVIDIA_H200")
    monkeypatch.setattr(tuned, "triton_version", lambda: (3, 6))
    tuned.forget()

    def write_file(*measured: tuple[tuned.Key, int], device: str = "NVIDIA_H200", triton: str = "3.6") -> None:
        path = tmp_path / "op" / "tuned" / f"{device}.triton-{triton}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps([{"key": key, "config": {"BLOCK": block, "num_warps": 8}} for key, block in measured])
        )

    yield write_file
    tuned.forget()


def block_for(**key: int | str) -> int:
    return tuned.config("op", H200, key, DEFAULT)["BLOCK"]


def test_the_key_nearest_by_ratio_is_used(write: Write) -> None:
    write(
        ({"rows": 1, "columns": 4096}, 10), ({"rows": 64, "columns": 4096}, 20), ({"rows": 4096, "columns": 4096}, 30)
    )
    assert block_for(rows=64, columns=4096) == 20
    assert block_for(rows=2, columns=4096) == 10
    assert block_for(rows=256, columns=4096) == 20
    assert block_for(rows=100_000, columns=1024) == 30


def test_an_entry_with_another_text_value_is_not_used(write: Write) -> None:
    write(({"rows": 1, "dtype": "bfloat16"}, 10), ({"rows": 64, "dtype": "float16"}, 20))
    assert block_for(rows=64, dtype="bfloat16") == 10
    assert block_for(rows=64, dtype="float32") == DEFAULT["BLOCK"]


def test_entries_of_another_kernel_of_the_op_are_not_used(write: Write) -> None:
    write(({"rows": 1, "pages": 2}, 10))
    assert block_for(rows=1) == DEFAULT["BLOCK"]


def test_a_device_that_was_not_measured_gets_the_default_and_one_line_in_the_log(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    write(({"rows": 1}, 10), device="NVIDIA_A100")
    with caplog.at_level(logging.INFO):
        assert [block_for(rows=1), block_for(rows=2)] == [DEFAULT["BLOCK"]] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "op is not tuned for NVIDIA_H200: its default options are used"
    ]


def test_the_nearest_version_of_triton_is_used_and_logged_once(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    write(({"rows": 1}, 10), triton="3.2")
    write(({"rows": 1}, 20), triton="3.9")
    with caplog.at_level(logging.INFO):
        assert [block_for(rows=1), block_for(rows=2)] == [20, 20]
    assert [record.getMessage() for record in caplog.records] == [
        "op on NVIDIA_H200: tuned with Triton 3.9, runs with 3.6"
    ]


def test_a_file_with_options_that_the_kernel_does_not_take_is_refused(write: Write) -> None:
    write(({"rows": 1}, 10))
    with pytest.raises(
        ValueError, match=r"op is tuned for \['BLOCK', 'num_warps'\] but takes \['SIZE'\]: tune it again"
    ):
        tuned.config("op", H200, {"rows": 1}, {"SIZE": 1})


def test_a_cpu_always_has_the_default(write: Write) -> None:
    write(({"rows": 1}, 10))
    assert tuned.config("op", torch.device("cpu"), {"rows": 1}, DEFAULT) == DEFAULT


def test_files_are_read_once(write: Write) -> None:
    write(({"rows": 1}, 10))
    assert block_for(rows=1) == 10
    write(({"rows": 1}, 99))
    assert [block_for(rows=1), block_for(rows=2)] == [10, 10]


def test_every_file_in_the_library_can_be_read() -> None:
    for path in tuned.LIBRARY.glob("*/tuned/*.json"):
        for entry in json.loads(path.read_text()):
            assert entry.keys() == {"key", "config"}, path
            assert entry["key"], path
            assert entry["config"], path

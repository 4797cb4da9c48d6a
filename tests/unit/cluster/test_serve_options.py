"""Options of `baton serve` become settings of an application."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from baton.cluster.cli.bench import bench_app
from baton.cluster.cli.cli_common import engine_args_from, in_a_folder
from baton.cluster.cli.main import app
from baton.cluster.cli.options import ServeOptions
from baton.cluster.cli.serve import application_spec, commands_for
from baton.cluster.spec import InvalidSpec, specs_in_file

MODEL = str(Path(__file__).parents[3] / "configs/demo/model")


@pytest.mark.parametrize(
    ("gpus", "cores", "options", "engine", "expected"),
    [
        (0, 64, {}, {}, 1),
        (1, 64, {}, {}, 2),
        (8, 8, {}, {}, 2),
        (1, 7, {}, {}, 1),
        (1, 64, {}, {"device": "cpu"}, 1),
        (1, 64, {"gateways": 1}, {}, 1),
        (0, 2, {"gateways": 3}, {}, 3),
        (1, 64, {"address": "auto"}, {}, 1),  # the machines of that cluster are unknown
    ],
)
def test_a_gpu_beside_many_cores_is_served_by_two_gateways(
    gpus: int,
    cores: int,
    options: dict[str, Any],
    engine: dict[str, Any],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def glob(folder: Path, pattern: str) -> Iterator[Path]:
        assert (str(folder), pattern) == ("/dev", "nvidia[0-9]*")
        return (folder / f"nvidia{index}" for index in range(gpus))

    monkeypatch.setattr(Path, "glob", glob)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    _, spec = application_spec(ServeOptions(model=MODEL, **options), engine)
    assert spec.gateway.replicas == expected


def test_a_folder_for_downloads_beside_a_model_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "application.yaml"
    file.write_text("model: org/name\nrevision: main\ndownload_dir: /data\nfleets: {unified: {}}\n")
    _, spec = application_spec(ServeOptions(model=MODEL, config=file), {})
    assert (spec.revision, spec.download_dir) == (None, None), "they belong to the file's model"
    assert specs_in_file(file, model=MODEL)["baton"].download_dir is None
    for options in (ServeOptions(model=MODEL, download_dir="/data"), ServeOptions(download_dir="/data", config=file)):
        file.write_text(f"model: {MODEL}\nfleets: {{unified: {{}}}}\n")
        with pytest.raises(InvalidSpec, match=f"^download_dir: is '/data', and '{MODEL}' is a folder, which is not"):
            application_spec(options, {})


def test_an_empty_name_of_the_model_is_refused_and_not_taken_for_none() -> None:
    with pytest.raises(InvalidSpec, match=r"^model_id: is empty: "):
        application_spec(ServeOptions(model=MODEL, model_id=""), {})


@pytest.mark.parametrize(
    "value", ["9" * 5000, "2024-13-45", "[" * 5000, "[float32"], ids=["long", "no date", "nested", "not closed"]
)
def test_a_value_that_cannot_be_read_is_refused_with_its_option(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--max-num-seqs", value], [f"--max-num-seqs={value}"]):
        with pytest.raises(SystemExit):
            engine_args_from(words)
        said = capsys.readouterr().err
        assert said.startswith("error: --max-num-seqs: '")
        assert "is not valid YAML" in said
        assert len(said) < 200


def test_suggested_commands_have_the_key_option_if_a_key_is_required() -> None:
    _, open_to_all = application_spec(ServeOptions(model=MODEL), {})
    _, keyed = application_spec(ServeOptions(model=MODEL, api_key=["secret"]), {})
    where = ("baton", "http://127.0.0.1:8000", "192.0.2.1:6379")
    assert commands_for(*where, open_to_all)[0] == "baton status --url http://127.0.0.1:8000"
    assert commands_for(*where, keyed)[0] == 'baton status --url http://127.0.0.1:8000 --api-key "$KEY"'


@pytest.mark.parametrize(
    ("words", "own", "engine"),
    [
        ("MODEL --max-num-seqs 3", {"model": "MODEL"}, {"max_num_seqs": 3}),
        ("--max-num-seqs 3 MODEL", {"model": "MODEL"}, {"max_num_seqs": 3}),
        ("--max-num-seqs=3 --dtype float32 MODEL", {"model": "MODEL"}, {"max_num_seqs": 3, "dtype": "float32"}),
        ("--config FILE --max-num-seqs 3", {"model": None, "config": Path("FILE")}, {"max_num_seqs": 3}),
        ("--max-num-seqs 3 --ep --port 9000", {"model": None, "ep": True, "port": 9000}, {"max_num_seqs": 3}),
        ("--enforce-eager MODEL", {"model": "MODEL"}, {"enforce_eager": True}),
        ("--enable-auto-tool-choice MODEL", {"model": "MODEL"}, {"enable_auto_tool_choice": True}),
        ("--no-enable-prefix-caching MODEL", {"model": "MODEL"}, {"enable_prefix_caching": False}),
        ("--enable-prefix-caching False MODEL", {"model": "MODEL"}, {"enable_prefix_caching": False}),
        ("--swap-space 4 MODEL", {"model": "MODEL"}, {"swap_space": 4}),
        ("--max-num-seqs 3 -- --MODEL", {"model": "--MODEL"}, {"max_num_seqs": 3}),
        ("-tp 2 -dp=4 MODEL -ep", {"model": "MODEL", "tp": 2, "dp": 4, "ep": True}, {}),
    ],
)
def test_engine_arguments_may_stand_before_and_after_the_model(
    words: str, own: dict[str, Any], engine: dict[str, Any]
) -> None:
    context = parsed(app, "serve", words)
    assert {name: context.params[name] for name in own} == own
    assert engine_args_from(context.args) == engine


def parsed(group: typer.Typer, command: str, words: str) -> Any:
    of_group: Any = typer.main.get_command(group)
    return of_group.commands[command].make_context(command, words.split())


def test_measurements_take_engine_arguments_before_the_model_too() -> None:
    for command in ("throughput", "latency", "drafts", "soak", "startup"):
        context = parsed(bench_app, command, "--dtype float32 --json out.json MODEL")
        assert (context.params["model"], engine_args_from(context.args)) == ("MODEL", {"dtype": "float32"})
    context = parsed(bench_app, "latency", "-tp 2 MODEL -ep")
    assert engine_args_from(context.args) == {"tensor_parallel_size": 2, "enable_expert_parallel": True}


def test_a_second_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        engine_args_from(parsed(app, "serve", "--max-num-seqs 3 MODEL OTHER").args)
    assert "unexpected argument 'OTHER'" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def access(path: Path, mode: int) -> bool:
        asked.append(path)
        return False

    monkeypatch.setattr("baton.cluster.cli.cli_common.os.access", access)
    (tmp_path / "old.json").touch()
    for name in ("new.json", "old.json"):
        with pytest.raises(typer.BadParameter, match=f"{name} cannot be written"):
            in_a_folder(tmp_path / name)
    assert asked == [tmp_path, tmp_path / "old.json"]

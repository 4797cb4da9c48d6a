"""Broken config files: `baton check` and `baton plan` print one line with the place, the value, and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton.cluster.cli.main import app
from baton.cluster.spec import specs_in_file

MODEL = Path(__file__).parents[3] / "configs/demo/model"
ONE = f"model: {MODEL}\nfleets: {{unified: {{}}}}\n"


def application(name: str, fleets: str, *, prefix: str = "", **others: str) -> str:
    """Return one application of a Serve config file, as YAML."""
    args = ", ".join(f"{key}: {value}" for key, value in {"model": MODEL, "fleets": fleets, **others}.items())
    serves = f"route_prefix: /{prefix or name}\n  import_path: baton.cluster.app:build_app"
    return f"- name: {name}\n  {serves}\n  args: {{{args}}}\n"


NO_YAML = {
    "": "must hold a mapping: a Serve config with `applications`, or the arguments of one application",
    "- a\n": "must hold a mapping: a Serve config with `applications`, or the arguments of one application",
    "model: [a\nfleets: }": "is not valid YAML: line 2, column 7: expected ',' or ']', but got ':'",
    "model:\n\t- x\n": "is not valid YAML: line 2, column 1: found character '\\t' that cannot start any token",
    "model: *nowhere\n": "is not valid YAML: line 1, column 8: found undefined alias 'nowhere'",
    "model: a\n---\nmodel: b\n": "is not valid YAML: line 2, column 1: but found another document",
    "model: 2024-13-45\n": "is not valid YAML: month must be in 1..12",
    "a: " + "[" * 5000: "cannot be read as YAML: it is nested too deeply",
    "model: a\nmodel: b\n": "is not valid YAML: line 2, column 1: the key 'model' is given twice",
    "fleets:\n  unified: {}\n  unified: {}\n": "is not valid YAML: line 3, column 3: the key 'unified' is given twice",
}
LAUGHS = "a: &a0 [lol]\n" + "".join(f"b{n}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(30))
MERGED_LAUGHS = "a: &a0 {x: 1}\n" + "".join(
    f"b{n}: &a{n + 1} {{<<: [{', '.join([f'*a{n}'] * 10)}]}}\n" for n in range(30)
)
NO_YAML |= {
    LAUGHS: "cannot be read as YAML: line 7: its anchors stand for more than 1000000 values",
    MERGED_LAUGHS: "cannot be read as YAML: line 7: its anchors stand for more than 1000000 values",
    "model: &a [*a]": "cannot be read as YAML: line 1: an anchor contains itself",
    "model: &a {<<: *a}": "cannot be read as YAML: line 1: an anchor contains itself",
    "a: &a0 []\n" + "".join(f"b{n}: &a{n + 1} [*a{n}]\n" for n in range(2000)): (
        "cannot be read as YAML: it is nested too deeply"
    ),
}
WRONG = {
    "fleets: {unified: {}}": "model: is missing",
    "model: 3\nfleets: {unified: {}}": "model: is 3, must be a text",
    "model: x\nfleets:": "fleets: is empty, must be a mapping",
    "model: x\nfleets: {unified: 3}": "fleets.unified: is 3, must be a mapping",
    "model: x\nfleets: {unifeid: {}}": "fleets.unifeid: is unknown; did you mean 'unified'?",
    "model: x\nfleets: {unified: {replicas: 0}}": "fleets.unified.replicas: is 0, must be at least 1",
    "model: x\nfleets: {unified: {replicas: two}}": "fleets.unified.replicas: is 'two', must be a whole number",
    "model: x\nfleets: {unified: {replicas: 1.5}}": "fleets.unified.replicas: is 1.5, must be a whole number",
    "model: x\nfleets: {unified: {replicas: yes}}": "fleets.unified.replicas: is true, must be a number",
    "model: x\nfleets: {unified: {num_gpus: .nan}}": "fleets.unified.num_gpus: is nan, must be a finite number",
    "model: x\nfleets: {unified: {resources: {a: -1}}}": "fleets.unified.resources.a: is -1, must be at least 0",
    "gateway: {port: -1}": "gateway.port: is -1, must be at least 1",
    "gateway: {port: 70000}": "gateway.port: is 70000, must be at most 65535",
    "gateway: {host: ''}": "gateway.host: is '', must have at least 1 character",
    "gateway: {drain_s: .inf}": "gateway.drain_s: is inf, must be a finite number",
    "gateway: {cost: {lease_s: 1}}": "gateway.cost.lease_s: is unknown; did you mean 'block_release_s'?",
    "gateway: {breaker: {windows_s: 1}}": "gateway.breaker.windows_s: is unknown; did you mean 'window_s'?",
    "logging: {levels: info}": "logging.levels: is unknown; did you mean 'level'?",
    "logging: {level: loud}": "logging.level: is 'loud', must be 'debug', 'info', 'warning' or 'error'",
    "gateway: []": "gateway: is a list, must be a mapping",
    "load_balancing: any": "load_balancing: is 'any', must be 'internal', 'hybrid' or 'external'",
    "engine: {max_num_seqs: -3}": "engine.max_num_seqs: is -3, must be at least 1",
    "engine: {max_num_seqs: many}": "engine.max_num_seqs: is 'many', must be a whole number",
    "engine: {swap_space: 8}": (
        "engine.swap_space: is 8: preempted requests are computed again; blocks are kept in the host's memory by an "
        "application alone (kv_tiers); leave it out, or give 0, 4"
    ),
    "engine: {tokenizer: x}": "engine.tokenizer: gateways tokenize, with the tokenizer in the model's folder",
    "engine: {max_num_seqs: 64, max_num_batched_tokens: 32}": (
        "engine arguments of unified: max_num_batched_tokens: is 32, must be at least max_num_seqs (64): every running "
        "request needs a token a step"
    ),
    "model: x\nfleets: {unified: {engine: {max_num_seq: 3}}}": (
        "fleets.unified.engine.max_num_seq: is unknown; did you mean 'max_num_seqs'?"
    ),
    "transfer: {lease_s: soon}": "transfer.lease_s: is 'soon', must be a number",
    "model_id: 2024-01-01": "model_id: is 2024-01-01, must be a text",
}
NO_APPLICATIONS = {
    "applications:": "applications: is empty, must be a list",
    "applications: [3]": "applications.0: is 3, must be a mapping",
    "applications: [{name: a, args: {}}]": "applications.0.import_path: is missing",
    "applications: [{import_path: 'other:app'}]": (
        "applications: none has import_path baton.cluster.app:build_app, which is Baton's"
    ),
}


def run(command: str, file: Path) -> Result:
    """Run a command, and check that it ends with an exit code and not with an exception."""
    done = CliRunner().invoke(app, [command, str(file)], env={"COLUMNS": "200"})
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done


def check_it_is_refused(file: Path, *said: str) -> None:
    checked, planned = run("check", file), run("plan", file)
    assert (checked.exit_code, planned.exit_code) == (1, 1)
    assert checked.output.splitlines() == [f"{file}: {line}" for line in said]
    assert planned.output == f"error: {file}: " + "\n".join(said) + "\n"


def written(folder: Path, content: str) -> Path:
    file = folder / "file.yaml"
    file.write_text(content)
    return file


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("content", "said"), NO_YAML.items(), ids=lambda text: text[:24])
def test_invalid_yaml_is_refused_with_the_place(tmp_path: Path, content: str, said: str) -> None:
    check_it_is_refused(written(tmp_path, content), said)


ANCHORED = f"""
fleets:
  prefill: &prefill
    <<: &any {{num_cpus: 0.1, replicas: 2}}
    replicas: 1
    engine: &engine {{max_num_seqs: 8, max_num_batched_tokens: 64}}
  decode:
    <<: [*prefill, *any]
    replicas: 3
    engine: {{<<: *engine, max_num_seqs: 16}}
model: {MODEL}
"""


def test_of_values_merged_over_several_levels_the_nearest_counts(tmp_path: Path) -> None:
    (spec,) = specs_in_file(written(tmp_path, ANCHORED)).values()
    assert [(fleet.replicas, fleet.num_cpus) for fleet in spec.fleets.present.values()] == [(1, 0.1), (3, 0.1)]
    assert [spec.engine_config(role).max_num_seqs for role in spec.fleets.present] == [8, 16]
    assert [spec.engine_config(role).max_num_batched_tokens for role in spec.fleets.present] == [64, 64]


def test_a_key_that_is_written_twice_beside_a_merged_one_is_refused(tmp_path: Path) -> None:
    content = "a: &a {x: 1}\nb:\n  <<: *a\n  x: 2\n  x: 3\n"
    check_it_is_refused(written(tmp_path, content), "is not valid YAML: line 5, column 3: the key 'x' is given twice")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("content", "said"), WRONG.items(), ids=lambda text: text[:60])
def test_what_is_wrong_is_named_with_what_was_given_and_what_is_allowed(
    tmp_path: Path, content: str, said: str
) -> None:
    whole = content.replace("model: x", f"model: {MODEL}") if "fleets:" in content else ONE + content
    check_it_is_refused(written(tmp_path, whole), said)


@pytest.mark.parametrize(("content", "said"), NO_APPLICATIONS.items(), ids=lambda text: text[:40])
def test_a_serve_config_without_a_baton_application_is_refused(tmp_path: Path, content: str, said: str) -> None:
    check_it_is_refused(written(tmp_path, content), said)


def test_each_problem_names_its_application(tmp_path: Path) -> None:
    first = application("a", "{unified: {replicas: 0}}")
    second = application("b", "{decode: {}}")
    check_it_is_refused(
        written(tmp_path, f"applications:\n{first}{second}"),
        "a: fleets.unified.replicas: is 0, must be at least 1",
        "b: fleets: decode engines need prefill engines to read KV blocks from: add `prefill`",
    )


def test_two_applications_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = application("a", "{unified: {}}") * 2
    said = "applications: two are named 'a'; give each a `name` of its own"
    check_it_is_refused(written(tmp_path, f"applications:\n{twice}"), said)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"prefix": "x"}, {"prefix": "x"}, "applications: two have the route_prefix '/x'; give each a `route_prefix`"),
        ({}, {}, "b: gateway.port: is 8000, as that of a: give each application a port of its own"),
        ({"gateway": "{port: 81}"}, {"gateway": "{port: 81}"}, "b: gateway.port: is 81, as that of a"),
    ],
)
def test_two_applications_of_one_route_or_port_are_refused(
    tmp_path: Path, first: dict[str, str], second: dict[str, str], said: str
) -> None:
    both = application("a", "{unified: {}}", **first) + application("b", "{unified: {}}", **second)
    done = run("check", written(tmp_path, f"applications:\n{both}"))
    assert done.exit_code == 1
    assert said in done.output


def test_gateways_of_two_applications_may_have_one_port_on_machines_of_their_own(tmp_path: Path) -> None:
    first = application("a", "{unified: {}}", gateway="{resources: {left: 0.01}}")
    second = application("b", "{unified: {}}", gateway="{resources: {right: 0.01}}")
    assert run("check", written(tmp_path, f"applications:\n{first}{second}")).exit_code == 0
    beside_ranks = [application(name, "{unified: {}}", load_balancing="hybrid") for name in "ab"]
    assert run("check", written(tmp_path, f"applications:\n{''.join(beside_ranks)}")).exit_code == 0


def test_too_many_ranks_are_refused_before_they_are_placed(tmp_path: Path) -> None:
    allowed = "and may have 16384: give fewer replicas or smaller groups (tensor_parallel_size, data_parallel_size)"
    for content in (
        "fleets: {prefill: {replicas: 16384}, decode: {replicas: 16384}}",
        "fleets: {unified: {replicas: 2}}\nengine: {data_parallel_size: 16384}",
    ):
        said = f"fleets: they have 32768 ranks in all, {allowed}"
        check_it_is_refused(written(tmp_path, f"model: {MODEL}\n{content}"), said)


def test_paths_that_are_no_text_file_are_refused(tmp_path: Path) -> None:
    wanted = "Give a config file, such as those in configs/serve; it names the model, or"
    for path, reason in ((tmp_path / "Qwen/Qwen3-0.6B", "No such file or directory"), (tmp_path, "Is a directory")):
        check_it_is_refused(path, f"cannot be read: {reason}. {wanted} --model of `baton plan` does")
    file = tmp_path / "file.yaml"
    file.write_bytes(ONE.encode("utf-16"))
    check_it_is_refused(file, "is not UTF-8 text")


@pytest.mark.parametrize("keys", ["secret", "[123, [secret]]"])
def test_errors_about_api_keys_do_not_show_the_keys(tmp_path: Path, keys: str) -> None:
    done = run("check", written(tmp_path, f"{ONE}gateway: {{api_keys: {keys}}}"))
    assert done.exit_code == 1
    assert "gateway.api_keys" in done.output
    assert "secret" not in done.output
    assert "123" not in done.output


@pytest.mark.parametrize("provider", ["3", "{}", "[]"])
def test_the_refusal_of_an_unknown_provider_is_batons_own(tmp_path: Path, provider: str) -> None:
    done = run("check", written(tmp_path, f"cluster_name: x\nprovider: {provider}\n"))
    assert done.exit_code == 1
    assert "provider: give `type: local`, `aws`" in done.output


def test_an_error_of_ray_is_printed_once(tmp_path: Path) -> None:
    file = written(tmp_path, "cluster_name: x\nprovider: {type: local}\nauth: {ssh_user: u}\n")
    done = run("check", file)
    (line,) = done.output.splitlines()
    assert line.startswith(f"{file}: `ray up` would refuse it: ")
    assert "head_ip" in line


@pytest.mark.parametrize(
    "words", [("--gpu-memory", "inf"), ("--gpu-memory", "nan"), ("--load", "inf"), ("--nodes", "0")]
)
def test_impossible_machines_are_refused(words: tuple[str, str]) -> None:
    done = CliRunner().invoke(app, ["plan", str(MODEL.parents[1] / "serve/demo.yaml"), *words])
    assert done.exit_code == 2
    assert words[0] in done.output

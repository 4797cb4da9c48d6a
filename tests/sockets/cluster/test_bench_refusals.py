"""Measurements of what does not exist end with a line that says so, and with exit code 2; without a server, with 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...helpers.baton_command import run_baton

pytestmark = pytest.mark.slow

NOBODY = "http://127.0.0.1:1"  # nothing listens at this port
MODEL = str(Path(__file__).parents[3] / "configs/demo/model")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((("bench", name, "/nope"), "'/nope' has no config.json") for name in ("throughput", "latency", "startup")),
        *((("bench", name, "/nope"), "'/nope' has no config.json") for name in ("drafts", "soak", "kv")),
        (("bench", "startup", MODEL, "--dtype", "float9"), "dtype: is 'float9'"),
        (("bench", "startup", MODEL, "--num-iters-cold", "-1"), "Invalid value for '--num-iters-cold'"),
        (("bench", "throughput", MODEL, "--max-model-len", "nope"), "max_model_len: is 'nope'"),
        (("bench", "kernels", "nope"), "no bench for nope"),
        (("bench", "report", "/nope"), "file '/nope' does not exist"),
        (("bench", "report", "pyproject.toml"), "is not a result of `baton bench serve`"),
        *(
            (("bench", "kv", option, "1000000"), "GB are free: give smaller")
            for option in ("--input-len", "--in-flight")
        ),
        *(
            (("bench", *words, "1000000000000"), f"Invalid value for '{words[-1]}'")
            for words in (
                ("kv", "--input-len"),
                ("kv", "--prefill-tp"),
                ("throughput", MODEL, "--num-prompts"),
                ("latency", MODEL, "--batch-size"),
                ("drafts", MODEL, "--batch-size"),
                ("soak", MODEL, "--seconds"),
                ("startup", MODEL, "--num-iters-cold"),
                ("router", "--unified"),
                ("router", "--num-blocks"),
                ("router", "--host-blocks"),
                ("router", "--gateways"),
                ("router", "--input-len"),
                ("autoscale", "--max-replicas"),
                ("autoscale", "--input-len"),
                ("autoscale", "--output-len"),
                ("serve", "--num-prompts"),
            )
        ),
        (("bench", "router", "--trace", "/nope"), "/nope cannot be read"),
        (("bench", "autoscale", "--trace", "/nope"), "/nope cannot be read"),
        (("bench", "serve", "--dataset-name", "sharegpt", "--dataset-path", "/nope"), "file '/nope' does not exist"),
        (("status", "--url", "nope://x"), "is not the URL of a server"),
    ],
)
def test_what_cannot_be_measured_is_named(words: tuple[str, ...], said: str) -> None:
    done = run_baton(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "serve", "--base-url", NOBODY, "--num-prompts", "1", "--ready-check-timeout-sec", "1"),
        ("eval", "recall", "--url", NOBODY),
        ("status", "--url", NOBODY),
        ("top", "--url", NOBODY, "--iterations", "1"),
        ("chat", "--url", NOBODY),
    ],
)
def test_a_server_that_does_not_answer_is_named(words: tuple[str, ...]) -> None:
    done = run_baton(*words)
    assert done.returncode == 1
    assert NOBODY in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_result_that_cannot_be_written_is_an_error() -> None:
    done = run_baton("bench", "router", "--num-prompts", "4", "--json", "/proc/result.json")
    assert done.returncode == 1 or "cannot be written by this user" in done.stderr  # only root may try
    assert "Traceback" not in done.stdout + done.stderr

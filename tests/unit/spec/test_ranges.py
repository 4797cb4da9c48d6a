"""Every number among the settings has a range: values outside are refused with the place, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel

from baton.cluster.spec import FleetSpec, InvalidSpec, load_spec
from baton.engine.config import EngineConfig, InvalidEngineConfig

ONE_VALUE = {"engine.block_size", "engine.pipeline_parallel_size"}  # which say so
UP_TO_64_BITS = {"engine.seed"}
NEEDED = {"engine.speculative_config": {"method": "suffix"}, "fleets.unified.kv_tiers": {"host_bytes": 1 << 30}}


def models_in(kind: Any) -> Iterator[type[BaseModel]]:
    """Yield the settings that a field holds."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for each in get_args(kind):
        yield from models_in(each)


def numbers_in(model: type[BaseModel], place: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the path of each number, and its constraints. Engines have theirs once, and fleets as `unified` does."""
    for name, field in model.model_fields.items():
        path = f"{place}{name}"
        if {int, float} & {field.annotation, *get_args(field.annotation)}:
            yield path, field.metadata
        elif path not in ("fleets.prefill", "fleets.decode", "fleets.unified.engine"):
            for each in models_in(field.annotation):
                yield from numbers_in(each, f"{path}.")


NUMBERS = {path: limits for path, limits in numbers_in(FleetSpec) if path not in ONE_VALUE}


def application(model: str, path: str, value: object) -> dict[str, Any]:
    """Return an application in which the setting at `path` has this value."""
    args: dict[str, Any] = {"model": model, "fleets": {"unified": {}}}
    if path.startswith("autoscaling."):
        args["fleets"]["unified"] = {"min_replicas": 1, "max_replicas": 2}
    part, (*parents, name) = args, path.split(".")
    for depth, each in enumerate(parents, start=1):
        part = part.setdefault(each, {})
        part.update(NEEDED.get(".".join(parents[:depth]), {}))
    part[name] = value
    return args


def test_numbers_of_every_part_are_found() -> None:
    assert {path.rpartition(".")[0] for path in NUMBERS} == {
        "engine",
        "engine.speculative_config",
        "gateway",
        "gateway.queue_limits",
        "gateway.breaker",
        "gateway.cost",
        "fleets.unified",
        "fleets.unified.kv_tiers",
        "transfer",
        "autoscaling",
    }


@pytest.mark.parametrize("path", NUMBERS)
def test_a_number_has_a_least_and_a_largest_value(path: str) -> None:
    assert any(isinstance(each, Ge | Gt) for each in NUMBERS[path])
    assert any(isinstance(each, Le | Lt) for each in NUMBERS[path])


@pytest.mark.parametrize("path", NUMBERS)
def test_values_that_make_no_sense_are_refused_with_the_place(path: str, model: str) -> None:
    huge = [10**18] if path not in UP_TO_64_BITS else []
    for value in (*huge, 10**30, 10**5000, 1e300, float("nan"), float("inf"), "", -(10**30)):
        with pytest.raises(InvalidSpec) as refusal:
            load_spec(application(model, path, value))
        lines = str(refusal.value).splitlines()
        assert [line for line in lines if line.startswith(f"{path}: ")], lines
        assert len(lines[0]) < 300, "a huge value is not printed whole"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("engine.max_num_seqs", 10**9, "is 1000000000, must be at most 65536"),
        ("engine.num_threads", 10**9, "is 1000000000, must be at most 1024"),
        ("gateway.body_processes", 10**9, "is 1000000000, must be at most 256"),
        ("gateway.request_timeout_s", 1e9, "is 1000000000.0, must be at most 1000000"),
        ("gateway.max_attempts", 10**30, "is a huge number, must be at most 1000"),
        ("gateway.request_timeout_s", 10**400, "is a huge number, must be a smaller one"),
        ("gateway.replicas", 1e300, "is 1e+300, must be a smaller one"),
        ("gateway.cost.prefill_tokens_per_s", 1e-300, "is 1e-300, must be at least 0.001"),
        ("fleets.unified.kv_tiers.host_bytes", 10**18, "is 1000000000000000000, must be at most 1000000000000000"),
        ("fleets.unified.resources.rack", 1e300, "is 1e+300, must be at most 1000000000"),
    ],
)
def test_a_refusal_says_what_is_allowed(path: str, value: object, said: str, model: str) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        load_spec(application(model, path, value))
    assert f"{path}: {said}" in str(refusal.value).splitlines()


def test_an_engine_without_an_application_has_the_same_ranges() -> None:
    with pytest.raises(InvalidEngineConfig, match="is 1000000000, must be at most 16384"):
        EngineConfig.from_args({"model": "folder", "tensor_parallel_size": 10**9})

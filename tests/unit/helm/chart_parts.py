"""Releases of the chart with changed values, and helpers that find their parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ...helpers.charts import EXAMPLES, Object, Release, merged, rayservice_problems, render, values_of

every_example = pytest.mark.parametrize("name", EXAMPLES)


def rendered(name: str, **changes: Any) -> Release:
    release = render(merged(values_of(name), changes))
    (service,) = release.all("RayService").values()
    assert rayservice_problems(service) == []
    return release


def containers(release: Release) -> Iterator[tuple[str, Object]]:
    for kind, pod in release.pods.items():
        (container,) = pod["spec"]["containers"]
        yield kind, container


def selects(selector: Object, labels: Object) -> bool:
    return selector.items() <= labels.items()

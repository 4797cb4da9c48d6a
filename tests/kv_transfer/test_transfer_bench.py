"""The benchmark runs and its figures hang together; how large they are is no test's business."""

from __future__ import annotations

import pytest

from baton.engine.core.layout import KVLayout
from baton.kv_transfer.bench import measure, table

LAYOUT = KVLayout(model="tiny", num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16")


@pytest.mark.timeout(90)
def test_it_measures_the_connector_beside_raw_nixl() -> None:
    result = measure(LAYOUT, num_tokens=(32, 100), in_flight=(2,), repeats=2, run_blocks=2)
    short, long = result["rows"]
    assert (short["num_bytes"], long["num_bytes"]) == (4 * LAYOUT.block_bytes, 14 * LAYOUT.block_bytes)
    assert short["descriptors"] == 2  # two prompts of one run of two blocks each
    assert all(row["gb_per_s"] > 0 and row["raw_gb_per_s"] > 0 and row["ratio"] > 0 for row in result["rows"])
    assert len(table(result).splitlines()) == 3

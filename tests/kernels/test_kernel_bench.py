from __future__ import annotations

import pytest
import torch

from baton.kernels import bench, roofline


def test_every_op_has_a_bench() -> None:
    assert {"attention", "linear", "rms_norm", "rope_kv", "silu_and_mul"} <= set(bench.ops_with_bench())


def test_an_op_without_a_bench_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no bench for atention: choose from attention"):
        bench.run_all(["atention"])


def test_a_row_says_how_far_from_the_nearer_roof_an_op_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "memory_bytes_per_s", lambda: 10e9)
    monkeypatch.setattr(roofline, "flop_per_s", lambda dtype: 100e9)
    monkeypatch.setattr(roofline, "seconds_per_call", lambda run: 2e-3)
    case = roofline.BenchCase("op", "shape", torch.bfloat16, lambda: None, num_bytes=10e6, flop=50e6)
    row = roofline.measure(case)
    assert (row.bound, row.dtype) == ("memory", "bfloat16")
    assert (row.time_us, row.gb_s, row.gflop_s, row.roof_share) == pytest.approx((2000, 5, 25, 0.5))


def test_cases_take_turns_over_their_buffers() -> None:
    seen: list[int] = []
    run = roofline.cycling(seen.append, [1, 2, 3])
    for _ in range(5):
        run()
    assert seen == [1, 2, 3, 1, 2]


@pytest.mark.slow
def test_the_table_holds_every_case_of_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "MEASURE_S", 0.001)
    rows = bench.run_all(["rms_norm", "rope_kv"])
    assert [row.op for row in rows] == ["rms_norm"] * 6 + ["rope_kv"] * 3
    assert all(row.time_us > 0 and row.roof_share > 0 for row in rows)
    assert bench.table(rows).row_count == len(rows)

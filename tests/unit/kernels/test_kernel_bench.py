from __future__ import annotations

import pytest
import torch

from baton.kernels import bench, roofline

from ...helpers.aot import compile_for_h200

CPU = torch.device("cpu")


def test_every_op_has_a_bench() -> None:
    assert set(bench.ops_with_bench()) == {
        "activation",
        "attention",
        "block_copy",
        "causal_conv",
        "embedding",
        "expert_map",
        "fp8",
        "gated_delta",
        "linear",
        "logprobs",
        "mla",
        "moe",
        "rms_norm",
        "rope_kv",
        "sampling",
        "ssd",
        "step",
    }


def test_an_op_without_a_bench_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no bench for atention: choose from activation"):
        bench.run_all(["atention"])


def test_a_row_shows_how_far_an_op_is_from_the_nearer_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "memory_bytes_per_s", lambda device: 10e9)
    monkeypatch.setattr(roofline, "flop_per_s", lambda dtype, device: 100e9)
    monkeypatch.setattr(roofline, "seconds_per_call", lambda run, device: 2e-3)
    case = roofline.BenchCase("op", "shape", torch.bfloat16, CPU, lambda: None, num_bytes=10e6, flop=50e6)
    row = roofline.measure(case)
    assert (row.bound, row.dtype) == ("memory", "bfloat16")
    assert (row.num_bytes, row.flop) == (10e6, 50e6)
    assert (row.time_us, row.gb_s, row.gflop_s, row.roof_share) == pytest.approx((2000, 5, 25, 0.5))


def test_cases_take_turns_over_their_buffers() -> None:
    seen: list[int] = []
    run = roofline.cycling(seen.append, [1, 2, 3])
    for _ in range(5):
        run()
    assert seen == [1, 2, 3, 1, 2]


@pytest.mark.slow
def test_the_table_holds_every_case_of_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "MEASURE_S", {"cpu": 0.001})
    monkeypatch.setattr(roofline, "CACHES_BYTES", 1 << 20)
    rows = bench.run_all(["rms_norm", "rope_kv"], CPU)
    assert [row.op for row in rows] == ["rms_norm"] * 8 + ["rope_kv"] * 3
    assert all(row.time_us > 0 and row.roof_share > 0 for row in rows)
    assert bench.table(rows, CPU).row_count == len(rows)


@pytest.mark.gpu
def test_on_a_gpu_the_bench_runs_a_captured_graph() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    calls: list[None] = []

    def run() -> None:
        calls.append(None)
        x.add_(1)

    assert roofline.seconds_per_call(run, torch.device("cuda")) > 0
    assert x[0].item() > 2 * len(calls)


def test_the_bandwidth_kernel_reads_all_of_its_buffer(triton_device: torch.device) -> None:
    streaming = pytest.importorskip("baton.kernels.streaming")
    source = torch.rand(3 * streaming.BLOCK, device=triton_device)
    torch.testing.assert_close(streaming.read(source), source.view(3, -1).sum(1))


def test_the_roof_is_read_16_bytes_at_a_time() -> None:
    streaming = pytest.importorskip("baton.kernels.streaming")
    types = {"source": "*fp32", "sums": "*fp32"}
    compiled = compile_for_h200(streaming.sum_block_kernel, types, {"BLOCK": streaming.BLOCK}, num_warps=8)
    assert compiled.widest_load_bytes == 16
    assert compiled.registers <= 64  # 1024 threads on a multiprocessor

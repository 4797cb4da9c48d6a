"""Mamba-2's recurrence in Triton against the reference; interpreted without a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from baton.kernels.ssd import StateBatch, ssd

from ...helpers.aot import Compiled, compile_for_h200
from .gate_kernels import time_step_of_each
from .ssd_cases import SMALL, Sizes, ssd_step
from .state_cases import assert_graph_serves_other_slots, assert_same_states

triton = pytest.importorskip("triton")
gpu = pytest.importorskip("baton.kernels.ssd.gpu")

from baton.kernels.ssd.gpu import scan, step, time_steps  # noqa: E402
from baton.kernels.ssd.gpu.options import SCAN, STEP, SUMS, SSDShape, scan_options  # noqa: E402

pytestmark = pytest.mark.exhaustive

RAGGED = [1, 1, 0, 63, 64, 65, 200]
CHECKPOINTS = [(4, 64), (6, 64), (6, 100), (6, 200)]
NEMOTRON = Sizes(128, 8, 64, 128)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_ragged_sequences_with_states_and_checkpoints(dtype: torch.dtype, triton_device: torch.device) -> None:
    step = ssd_step(RAGGED, triton_device, dtype=dtype, fresh=[1, 5], checkpoints=CHECKPOINTS)
    step.check(gpu.ssd, scan={**SCAN, "VALUES": 32, "num_stages": 1})


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(1, 1),
        Sizes(2, 2, 16, 64),
        Sizes(4, 1, 64, 16),
        Sizes(6, 2, 16, 256),
        Sizes(2, 1, 128, 16),
        Sizes(2, 1, 80, 16),  # as wide as in Nemotron Nano 2
        Sizes(2, 1, 48, 16),
    ],
    ids=str,
)
def test_all_groups_and_sizes_equal_the_reference(sizes: Sizes, triton_device: torch.device) -> None:
    ssd_step([1, 70], triton_device, sizes=sizes, in_place=False).check(gpu.ssd)


def test_a_checkpoint_may_overwrite_the_state_that_was_read(triton_device: torch.device) -> None:
    checkpoints = [(0, 8), (1, 64), (2, 100), (2, 200)]
    step = ssd_step([65, 130, 270], triton_device, checkpoints=checkpoints, in_place=False, keeps_in_source=True)
    assert set(step.batch.sources.tolist()) <= set(step.batch.checkpoints.tolist())
    step.check(gpu.ssd)


def test_a_captured_step_of_any_mix_skips_its_padding(triton_device: torch.device) -> None:
    case = {"checkpoints": [(3, 64), (3, 80), (5, 8)], "fresh": [1, 5], "padding": 3}
    step = ssd_step([1, 1, 1, 130, 1, 20], triton_device, **case)  # type: ignore[arg-type]
    assert (step.batch.least_decodes, step.batch.num_decodes.item(), step.batch.most_decodes) == (0, 3, 9)
    step.check(gpu.ssd)


def test_a_few_tokens_go_one_by_one(triton_device: torch.device) -> None:
    step = ssd_step([4, 1, 0, 3], triton_device, decode_tokens=4, fresh=[1])
    assert step.batch.num_decodes.item() == 4
    step.check(gpu.ssd)


@pytest.mark.parametrize("log_rate", [-20.0, 6.0])
def test_decays_may_be_zero_or_nearly_complete(log_rate: float, triton_device: torch.device) -> None:
    step = ssd_step([1, 150], triton_device, log_rate=log_rate)
    step.check(gpu.ssd, slack=100.0)  # a difference of summed decays is only as exact as the sums


@pytest.mark.parametrize("limits", [(0.0, 0.05), (0.2, 0.3)])
def test_time_steps_are_clamped_to_their_limits(limits: tuple[float, float], triton_device: torch.device) -> None:
    step = ssd_step([1, 70], triton_device, limits=limits)
    step.check(gpu.ssd)
    free = dataclasses.replace(step, time_steps=dataclasses.replace(step.time_steps, limits=(0.0, 1e9)))
    assert not torch.allclose(free.run(gpu.ssd)[0], step.run(gpu.ssd)[0], atol=1e-3)


def test_short_time_steps_have_a_small_relative_error(triton_device: torch.device) -> None:
    raw = torch.linspace(-24, 24, 1024, device=triton_device)
    found = torch.empty_like(raw)
    time_step_of_each[(1,)](raw, found, SIZE=len(raw))
    exact = torch.nn.functional.softplus(raw.double(), threshold=50)
    torch.testing.assert_close(found.double(), exact, rtol=5e-5, atol=0)


def test_bias_and_skip_may_be_left_out(triton_device: torch.device) -> None:
    ssd_step([1, 70], triton_device, with_bias=False, with_skip=False).check(gpu.ssd)


@pytest.mark.parametrize("values", [16, 32])
def test_options_change_nothing_but_the_time(values: int, triton_device: torch.device) -> None:
    options = {"scan": {**SCAN, "VALUES": values}, "step": {**STEP, "VALUES": values // 2}}
    ssd_step([1, 100], triton_device).check(gpu.ssd, **options)


@pytest.mark.parametrize("segments", [2, 3, 8])
def test_a_sequence_may_be_divided_into_segments(segments: int, triton_device: torch.device) -> None:
    """Also one of fewer chunks than segments, and with checkpoints that a segment begins or ends with."""
    checkpoints = [(1, 64), (3, 100), (3, 300)]
    step = ssd_step([1, 200, 65, 400], triton_device, fresh=[2], checkpoints=checkpoints)
    step.check(gpu.ssd, scan={**SCAN, "VALUES": 16, "SEGMENTS": segments})


def test_a_segment_may_overwrite_the_state_that_was_read(triton_device: torch.device) -> None:
    checkpoints = [(0, 8), (1, 64), (2, 100), (2, 200)]
    step = ssd_step([65, 130, 270], triton_device, checkpoints=checkpoints, in_place=False, keeps_in_source=True)
    step.check(gpu.ssd, scan={**SCAN, "VALUES": 32, "SEGMENTS": 3})


def test_a_prompt_may_be_cut_anywhere(triton_device: torch.device) -> None:
    step = ssd_step([150], triton_device)
    whole, whole_state = step.run(gpu.ssd)
    state, slot = step.state.clone(), step.batch.sources.tolist()
    for first, end in ((0, 70), (70, 71), (71, 150)):
        batch = StateBatch.plan([end - first], slot, slot, device=triton_device)
        part = dataclasses.replace(step.sliced(slice(first, end), batch), state=state)
        out, state = part.run(gpu.ssd)
        torch.testing.assert_close(out, whole[first:end], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state[slot], whole_state[slot], atol=1e-5, rtol=1e-5)


def test_nan_in_one_sequence_does_not_reach_others(triton_device: torch.device) -> None:
    step = ssd_step([1, 40, 70], triton_device)
    clean, clean_state = step.run(gpu.ssd)
    for rows in (step.x, step.b, step.c, step.time_steps.raw):
        rows[41:] = float("nan")
    out, state = step.run(gpu.ssd)
    assert torch.equal(out[:41], clean[:41])
    assert torch.equal(state[step.written[:2]], clean_state[step.written[:2]])
    assert out[41:].isnan().all()


def test_padding_of_a_captured_graph_reads_and_writes_nothing(triton_device: torch.device) -> None:
    step = ssd_step([1, 1, 1], triton_device, fresh=[1, 2])
    targets = step.batch.targets.clone()
    targets[2] = -1
    dataclasses.replace(step, batch=dataclasses.replace(step.batch, targets=targets)).check(gpu.ssd)


def test_a_state_without_a_target_is_not_written(triton_device: torch.device) -> None:
    step = ssd_step([1, 70], triton_device)
    batch = dataclasses.replace(step.batch, targets=torch.full_like(step.batch.targets, -1))
    # The arena has one more slot in front, which shows writes to slot -1.
    arena = torch.cat([torch.full_like(step.state[:1], 3.0), step.state])
    before = arena.clone()
    gpu.ssd(step.x, step.b, step.c, step.time_steps, arena[1:], batch, skip=step.skip)
    assert_same_states(arena, before)


def test_inputs_may_be_views_of_one_tensor(triton_device: torch.device) -> None:
    step = ssd_step([1, 70], triton_device)
    parts = (step.x, step.b, step.c, step.time_steps.raw)
    packed = torch.cat([rows.flatten(1) for rows in parts], 1)
    x, b, c, raw = packed.split([rows[0].numel() for rows in parts], 1)
    viewed = dataclasses.replace(
        step,
        x=x.unflatten(1, (SMALL.heads, -1)),
        b=b.unflatten(1, (SMALL.groups, -1)),
        c=c.unflatten(1, (SMALL.groups, -1)),
        time_steps=dataclasses.replace(step.time_steps, raw=raw),
    )
    out, state = viewed.run(gpu.ssd)
    expected, expected_state = step.run(gpu.ssd)
    assert torch.equal(out, expected)
    assert torch.equal(state[step.written], expected_state[step.written])


# ---- compiled for an H200 --------------------------------------------------------------------------------------------

TYPES = {
    **dict.fromkeys(("x", "b", "c", "raw", "out"), "*bf16"),
    **dict.fromkeys(("log_rate", "bias", "skip", "factors", "state", "starts", "totals"), "*fp32"),
    **dict.fromkeys(("query_start", "sources", "targets", "num_decodes"), "*i32"),
    **dict.fromkeys(("chunk_start", "checkpoints", "seq_chunks"), "*i32"),
    **dict.fromkeys(("x_stride", "b_stride", "c_stride", "raw_stride", "state_stride", "out_stride"), "i32:16"),
    "drafts_stride": "i32:16",
    **{"first_seq": "i32", "lowest": "fp32", "highest": "fp32"},
}
SIZES = {"NUM_HEADS": 128, "GROUP": 16, "HEAD_DIM": 64, "STATE_DIM": 128, "CHUNK": 64, "PRECISION": "tf32"}


DRAFTS = {
    **dict.fromkeys(("draft_x", "draft_b", "draft_raw"), "*bf16"),
    **dict.fromkeys(("replay_rows", "replay_starts", "replay_counts"), "*i32"),
}


def compiled(
    kernel: object, options: dict[str, int], *, max_spill_bytes: int = 0, num_places: int = 0, **constants: object
) -> Compiled:
    names = set(kernel.arg_names)  # type: ignore[attr-defined]
    launch = {name: value for name, value in options.items() if name.startswith("num_")}
    of_drafts = {"NUM_PLACES": num_places} | ({} if num_places else dict.fromkeys(DRAFTS))
    of_segments = {} if options.get("SEGMENTS", 1) > 1 else dict.fromkeys(("starts", "totals"))
    given = SIZES | of_drafts | of_segments | options | constants
    words = {name: value for name, value in given.items() if name in names}
    types = {name: kind for name, kind in (TYPES | DRAFTS).items() if name in names and name not in words}
    return compile_for_h200(kernel, types, words, max_spill_bytes=max_spill_bytes, **launch)


@pytest.mark.parametrize(
    ("segments", "warps", "stages", "max_spill_bytes"),
    [(1, 4, 2, 160), (1, 4, 3, 160), (1, 8, 3, 64), (4, 4, 3, 160)],  # addresses and masks spill, not states
)
def test_the_scan_runs_on_tensor_cores_and_loads_ahead(
    segments: int, warps: int, stages: int, max_spill_bytes: int
) -> None:
    options = {"VALUES": 64, "SEGMENTS": segments, "num_warps": warps, "num_stages": stages}
    made = compiled(scan.scan_chunks, options, max_spill_bytes=max_spill_bytes)
    assert made.wgmma
    assert not made.waits_for_each_product
    assert "mma.sync" not in made.ptx
    assert "cp.async.cg.shared.global" in made.ptx
    assert (made.loads_ahead > 0) == (stages > 2)
    assert "griddepcontrol.wait" in made.ptx


def test_states_before_segments_are_summed_on_tensor_cores() -> None:
    options = {"VALUES": 64, "SEGMENTS": 4, "num_warps": 4, "num_stages": 3}
    made = compiled(scan.sum_segments, options)
    assert made.wgmma
    assert made.loads_ahead > 0


def test_wide_states_run_on_tensor_cores() -> None:
    # Addresses and masks spill, which are the same for every chunk. The state stays in registers.
    made = compiled(scan.scan_chunks, {**SCAN, "num_warps": 8}, max_spill_bytes=400, STATE_DIM=256)
    assert made.wgmma
    assert "mma.sync" not in made.ptx


def test_few_rows_of_a_state_run_on_tensor_cores() -> None:
    """A program takes 16 of a head's 80 dimensions: the largest power of two that divides them."""
    shape = SSDShape(num_heads=128, group=16, head_dim=80, state_dim=128)
    narrow = scan_options(shape, 1, 1024, torch.bfloat16, torch.device("cpu"))
    assert narrow["VALUES"] == 16
    assert "mma.sync" in compiled(scan.scan_chunks, narrow, HEAD_DIM=80).ptx


@pytest.mark.parametrize("num_places", [0, 7])
@pytest.mark.parametrize("values", [8, 32, 64])
def test_a_decode_keeps_its_state_in_registers(values: int, num_places: int) -> None:
    options = {"VALUES": values, "num_warps": {8: 1, 32: 4, 64: 8}[values]}
    made = compiled(step.step_tokens, options, num_places=num_places, PREFETCH=32)
    assert made.widest_load_bytes == 16
    assert "prefetch.global.L2" in made.ptx


def test_time_steps_are_summed_up_without_a_stack() -> None:
    assert "griddepcontrol.wait" in compiled(time_steps.sum_time_steps, SUMS).ptx


# ---- on the device --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize(("segments", "warps", "stages"), [(1, 4, 2), (1, 8, 3), (4, 4, 3)])
def test_bfloat16_on_the_device(segments: int, warps: int, stages: int) -> None:
    step = ssd_step(
        [*RAGGED, 700],
        torch.device("cuda"),
        sizes=NEMOTRON,
        dtype=torch.bfloat16,
        fresh=[1, 5],
        checkpoints=[*CHECKPOINTS, (7, 512)],
    )
    options = {"VALUES": 64, "SEGMENTS": segments, "num_warps": warps, "num_stages": stages}
    step.check(gpu.ssd, scan=options)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1, 1, 1], [65, 130]])
def test_slots_past_4_gib_are_found(lengths: list[int]) -> None:
    device = torch.device("cuda")
    near = ssd_step(lengths, device, sizes=NEMOTRON, dtype=torch.bfloat16)
    first_slot = (1 << 32) // near.state[0].numel() + 1
    far = ssd_step(lengths, device, sizes=NEMOTRON, dtype=torch.bfloat16, first_slot=first_slot)
    out, state = far.run(gpu.ssd)
    expected, expected_state = near.run(gpu.ssd)
    assert torch.equal(out, expected)
    assert torch.equal(state[far.written], expected_state[near.written])


@pytest.mark.gpu
def test_a_captured_graph_serves_later_slots() -> None:
    step = ssd_step([1] * 8, torch.device("cuda"), sizes=NEMOTRON, dtype=torch.bfloat16)
    state = step.state.nan_to_num(0.5)

    def run() -> torch.Tensor:
        return ssd(step.x, step.b, step.c, step.time_steps, state, step.batch, skip=step.skip)

    assert_graph_serves_other_slots(run, state, step.batch)

"""The gated delta rule in Triton against the reference; interpreted without a GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from baton.kernels.gated_delta import StateBatch, gated_delta, reference

from ...helpers.aot import Compiled, compile_for_h200
from .delta_cases import SCALE, SMALL, Heads, delta_step
from .gate_kernels import log2_decays
from .kernel_checks import assert_as_accurate, tf32x3_slack
from .state_cases import assert_graph_serves_other_slots

triton = pytest.importorskip("triton")
tl = triton.language
gpu = pytest.importorskip("baton.kernels.gated_delta.gpu")

from baton.kernels.gated_delta.gpu import intra, intra_per_dim, scan, step  # noqa: E402
from baton.kernels.gated_delta.gpu.intra import unit_lower_inverse  # noqa: E402
from baton.kernels.gated_delta.gpu.options import (  # noqa: E402
    INTRA,
    INTRA_PER_DIM,
    SCAN,
    STEP,
    WIDE_SCAN,
    Shape,
    narrowed,
)

pytestmark = pytest.mark.exhaustive

RAGGED = [1, 1, 0, 63, 64, 65, 200]
CHECKPOINTS = [(4, 64), (6, 64), (6, 100), (6, 200)]
QWEN, OLMO = Heads(16, 32, 128, 128), Heads(30, 30, 96, 192)
HEADS = [Heads(1, 1), Heads(2, 2, 16, 64), Heads(1, 4, 64, 16), Heads(3, 6), Heads(2, 2, 96, 192), Heads(1, 2, 48, 80)]


def test_decays_near_1_have_a_small_relative_error(triton_device: torch.device) -> None:
    """A head that hardly forgets multiplies its state by such a decay once for each token of a long text."""
    x = torch.linspace(-24, 24, 1024, device=triton_device)
    found = torch.empty_like(x)
    log2_decays[(1,)](x, found, 1.5, SIZE=len(x))
    exact = -1.5 * torch.nn.functional.softplus(x.double(), threshold=50) / math.log(2)
    torch.testing.assert_close(found.double(), exact, rtol=5e-5, atol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("per_dim", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_ragged_sequences_with_states_and_checkpoints(
    dtype: torch.dtype, per_dim: bool, triton_device: torch.device
) -> None:
    step = delta_step(RAGGED, triton_device, dtype=dtype, per_dim=per_dim, fresh=[1, 5], checkpoints=CHECKPOINTS)
    step.check(gpu.gated_delta)


@pytest.mark.slow
@pytest.mark.parametrize("per_dim", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_head_groups_and_sizes(heads: Heads, per_dim: bool, triton_device: torch.device) -> None:
    step = delta_step([1, 70, 130], triton_device, heads=heads, per_dim=per_dim, in_place=False, checkpoints=[(2, 64)])
    step.check(gpu.gated_delta)


@pytest.mark.slow
@pytest.mark.parametrize("per_dim", [False, True])
def test_a_token_may_flip_the_sign_of_a_state(per_dim: bool, triton_device: torch.device) -> None:
    delta_step([1, 70], triton_device, per_dim=per_dim, beta_scale=2.0).check(gpu.gated_delta)


@pytest.mark.slow
@pytest.mark.parametrize("per_dim", [False, True])
def test_a_checkpoint_may_overwrite_the_state_that_was_read(per_dim: bool, triton_device: torch.device) -> None:
    checkpoints = [(0, 8), (1, 64), (2, 100), (2, 200)]
    options = {"checkpoints": checkpoints, "in_place": False, "keeps_in_source": True}
    step = delta_step([65, 130, 270], triton_device, per_dim=per_dim, **options)  # type: ignore[arg-type]
    assert set(step.batch.sources.tolist()) <= set(step.batch.checkpoints.tolist())
    step.check(gpu.gated_delta)


@pytest.mark.slow
@pytest.mark.parametrize("per_dim", [False, True])
def test_a_captured_step_of_any_mix_skips_its_padding(per_dim: bool, triton_device: torch.device) -> None:
    case = {"checkpoints": [(3, 64), (3, 80), (5, 8)], "fresh": [1, 5], "padding": 3}
    step = delta_step([1, 1, 1, 130, 1, 20], triton_device, per_dim=per_dim, **case)  # type: ignore[arg-type]
    assert (step.batch.least_decodes, step.batch.num_decodes.item(), step.batch.most_decodes) == (0, 3, 9)
    step.check(gpu.gated_delta)


@pytest.mark.parametrize("per_dim", [False, True])
def test_a_few_tokens_go_one_by_one(per_dim: bool, triton_device: torch.device) -> None:
    step = delta_step([4, 1, 0, 3], triton_device, decode_tokens=4, per_dim=per_dim, fresh=[1])
    assert step.batch.num_decodes.item() == 4
    step.check(gpu.gated_delta)


@pytest.mark.slow
@pytest.mark.parametrize("per_dim", [False, True])
@pytest.mark.parametrize("strength", [0.0, 4.0, 50.0])
def test_decays_may_be_zero_or_nearly_complete(per_dim: bool, strength: float, triton_device: torch.device) -> None:
    step = delta_step([1, 150], triton_device, per_dim=per_dim, raw_gate=False, strength=strength, norm_eps=None)
    step.check(gpu.gated_delta, slack=100.0)  # a difference of summed decays is only as exact as the sums


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("solve", [8, 16, 32, 64])
def test_keys_that_are_all_the_same_do_not_blow_up(solve: int, beta: float, triton_device: torch.device) -> None:
    step = delta_step([64], triton_device, raw_gate=False, strength=0.0)
    gate = dataclasses.replace(step.gate, beta=torch.full_like(step.gate.beta, beta))
    same = dataclasses.replace(step, k=step.k[:1].expand_as(step.k).contiguous(), gate=gate)
    # With a beta of 2 the tokens of a chunk add up with alternating signs, so rounding errors grow with their number.
    same.check(gpu.gated_delta, slack=4.0 if beta < 2 else 64.0, intra={**INTRA, "SOLVE": solve})


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("values", [16, 32])
def test_options_change_nothing_but_the_time(heads: int, values: int, triton_device: torch.device) -> None:
    options = {"intra": {**INTRA, "HEADS": heads}, "scan": {**SCAN, "VALUES": values}, "step": {**STEP, "VALUES": 8}}
    delta_step([1, 100], triton_device).check(gpu.gated_delta, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_nan_in_one_sequence_does_not_reach_others(triton_device: torch.device) -> None:
    step = delta_step([1, 40, 70], triton_device)
    clean, clean_state = step.run(gpu.gated_delta)
    for x in (step.q, step.k, step.v):
        x[41:] = float("nan")
    out, state = step.run(gpu.gated_delta)
    assert torch.equal(out[:41], clean[:41])
    assert torch.equal(state[step.written[:2]], clean_state[step.written[:2]])
    assert out[41:].isnan().all()


@pytest.mark.parametrize("per_dim", [False, True])
def test_padding_of_a_captured_graph_reads_and_writes_nothing(per_dim: bool, triton_device: torch.device) -> None:
    step = delta_step([1, 1, 1], triton_device, fresh=[1, 2], per_dim=per_dim)
    targets = step.batch.targets.clone()
    targets[2] = -1
    padded = dataclasses.replace(step, batch=dataclasses.replace(step.batch, targets=targets))
    padded.check(gpu.gated_delta)


@pytest.mark.slow
def test_inputs_may_be_views_of_one_tensor(triton_device: torch.device) -> None:
    step = delta_step([1, 70], triton_device)
    tokens = len(step.q)
    packed = torch.cat([x.reshape(tokens, -1) for x in (step.q, step.k, step.v)], 1)
    q, k, v = packed.split([x[0].numel() for x in (step.q, step.k, step.v)], 1)
    gates = torch.cat([step.gate.beta, step.gate.decay], 1)
    beta, decay = gates.split(SMALL.values, 1)
    viewed = dataclasses.replace(
        step,
        q=q.unflatten(1, (SMALL.keys, -1)),
        k=k.unflatten(1, (SMALL.keys, -1)),
        v=v.unflatten(1, (SMALL.values, -1)),
        gate=dataclasses.replace(step.gate, beta=beta, decay=decay),
    )
    out, _ = viewed.run(gpu.gated_delta)
    assert torch.equal(out, step.run(gpu.gated_delta)[0])


@pytest.mark.slow
def test_a_prompt_gives_the_same_whole_or_in_chunks_or_token_by_token(triton_device: torch.device) -> None:
    step = delta_step([135], triton_device)
    exact, exact_state = step.converted(torch.float64).run(reference.gated_delta)
    slot = step.batch.sources.tolist()
    for cuts in ([135], [64, 71], [1] * 5 + [30, 100]):
        state, parts, first = step.state.clone(), [], 0
        for length in cuts:
            tokens = slice(first, first + length)
            batch = StateBatch.plan([length], slot, slot, device=triton_device)
            inputs = (step.q[tokens], step.k[tokens], step.v[tokens], step.gate.sliced(tokens))
            parts.append(gpu.gated_delta(*inputs, state, batch, scale=SCALE))
            first += length
        assert_as_accurate(
            torch.cat(parts), exact, step.run(reference.gated_delta)[0], slack=8.0 * tf32x3_slack(step.q)
        )
        torch.testing.assert_close(state[slot].double(), exact_state[slot], atol=1e-4, rtol=1e-4)


@triton.jit
def _invert(a, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    cells = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + cells, unit_lower_inverse(tl.load(a + cells), SIZE, BLOCK, "tf32x3"))


@pytest.mark.parametrize("block", [8, 16, 32, 64])
def test_the_inverse_of_a_triangle(block: int, triton_device: torch.device) -> None:
    a = (torch.randn(64, 64) / 4).tril(-1).to(triton_device)
    out = torch.full_like(a, float("nan"))
    _invert[(1,)](a, out, SIZE=64, BLOCK=block)
    exact = torch.linalg.inv(torch.eye(64).double() + a.cpu().double())
    torch.testing.assert_close(out.cpu().double(), exact, atol=1e-5 * exact.abs().max().item(), rtol=1e-5)


# ---- compiled ahead -------------------------------------------------------------------------------------------------

TENSORS = ("q", "k", "v", "decay", "beta", "mixing", "attention", "out", "read_keys", "read_queries", "write_keys")
TYPES = {
    **dict.fromkeys(TENSORS, "*bf16"),
    **dict.fromkeys(("log_rate", "bias", "factors", "keep", "state"), "*fp32"),
    **dict.fromkeys(("query_start", "sources", "targets", "num_decodes"), "*i32"),
    **dict.fromkeys(("chunk_start", "checkpoints", "seq_chunks"), "*i32"),
    **dict.fromkeys(("q_stride", "k_stride", "v_stride", "decay_stride", "beta_stride"), "i32:16"),
    **dict.fromkeys(("state_stride", "out_stride", "drafts_stride"), "i32:16"),
    **{"first_seq": "i32", "scale": "fp32", "eps": "fp32"},
}
SIZES = {"NUM_HEADS": 32, "GROUP": 2, "KEY_DIM": 128, "KEYS": 128, "VALUE_DIM": 128, "CHUNK": 64}
SIZES |= {"PRECISION": "tf32", "NORM": True, "BETA_SCALE": 1.0}
REPLAY = ("replay_rows", "replay_starts", "replay_counts")
DRAFTS = {
    **dict.fromkeys(("draft_k", "draft_v", "draft_decay", "draft_beta"), "*bf16"),
    **dict.fromkeys(REPLAY, "*i32"),
}


def compiled(
    kernel: object, options: dict[str, int], *, max_spill_bytes: int = 0, num_places: int = 0, **constants: object
) -> Compiled:
    names = set(kernel.arg_names)  # type: ignore[attr-defined]
    launch = {name: value for name, value in options.items() if name.startswith("num_")}
    of_drafts = {"NUM_PLACES": num_places} | ({} if num_places else dict.fromkeys(DRAFTS))
    words = {name: value for name, value in (SIZES | of_drafts | options | constants).items() if name in names}
    types = {name: kind for name, kind in (TYPES | DRAFTS).items() if name in names and name not in words}
    return compile_for_h200(kernel, types, words, max_spill_bytes=max_spill_bytes, **launch)


@pytest.mark.slow
def test_the_intra_chunk_kernel_runs_on_tensor_cores() -> None:
    made = compiled(intra.intra_chunk, INTRA)
    assert made.wgmma
    assert made.widest_load_bytes == 16
    assert "griddepcontrol.wait" in made.ptx


@pytest.mark.slow
def test_the_intra_chunk_kernel_of_decays_per_dimension_runs_on_tensor_cores() -> None:
    made = compiled(intra_per_dim.intra_chunk_per_dim, INTRA_PER_DIM, max_spill_bytes=704, GROUP=1)
    assert not made.waits_for_each_product
    assert made.ptx.count("wgmma.mma_async") < 120  # the levels are a loop, not unrolled


@pytest.mark.parametrize("num_places", [0, 7])
@pytest.mark.parametrize("per_dim", [False, True])
@pytest.mark.parametrize("values", [8, 32, 128])
def test_a_decode_keeps_its_state_in_registers(values: int, per_dim: bool, num_places: int) -> None:
    options = {"VALUES": values, "num_warps": {8: 1, 32: 4, 128: 8}[values]}
    made = compiled(step.step_tokens, options, num_places=num_places, PER_DIM=per_dim, PREFETCH=min(values, 32))
    assert made.widest_load_bytes == 16
    assert "prefetch.global.L2" in made.ptx


@pytest.mark.parametrize("num_places", [0, 7])
@pytest.mark.parametrize("per_dim", [False, True])
@pytest.mark.parametrize(("values", "max_spill_bytes"), [(64, 0), (128, 256)])
def test_the_sums_of_a_decode_by_columns_stay_within_a_warp(
    values: int, max_spill_bytes: int, per_dim: bool, num_places: int
) -> None:
    options = {"VALUES": values, "LANES": 8, "WARPS": 4, "num_warps": 4}
    words = {"num_places": num_places, "PER_DIM": per_dim, "PREFETCH": 32}
    made = compiled(step.step_tokens_by_columns, options, max_spill_bytes=max_spill_bytes, **words)  # type: ignore[arg-type]
    assert made.widest_load_bytes == 16
    assert made.shared_bytes == 0
    assert "prefetch.global.L2" in made.ptx


@pytest.mark.parametrize("per_dim", [False, True])
def test_decodes_whose_decays_are_given_compile(per_dim: bool) -> None:
    constants = {"PER_DIM": per_dim, "PREFETCH": 32, "log_rate": None, "bias": None}
    compiled(step.step_tokens, {"VALUES": 32, "num_warps": 4}, **constants)
    compiled(step.step_tokens_by_columns, {"VALUES": 64, "LANES": 8, "WARPS": 4, "num_warps": 4}, **constants)


@pytest.mark.slow
def test_the_scan_runs_on_tensor_cores() -> None:
    assert compiled(scan.scan_chunks, WIDE_SCAN, max_spill_bytes=64, PER_DIM=False, write_keys=None).wgmma


def test_head_dimensions_of_no_power_of_two_run_on_tensor_cores() -> None:
    sizes = {"NUM_HEADS": 30, "GROUP": 1, "KEY_DIM": 96, "VALUE_DIM": 192, "BETA_SCALE": 2.0}
    shape = Shape(30, 1, 96, 192, per_dim=False)
    made = compiled(intra.intra_chunk, INTRA, **sizes)
    assert made.wgmma
    assert made.widest_load_bytes == 16
    words = {"PER_DIM": False, "write_keys": None, **sizes}
    assert "mma.sync" in compiled(scan.scan_chunks, narrowed(SCAN, shape), max_spill_bytes=64, **words).ptx  # type: ignore[arg-type]
    assert (
        compiled(step.step_tokens, narrowed(STEP, shape), PER_DIM=False, PREFETCH=32, **sizes).widest_load_bytes == 16
    )


# ---- on the device --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("per_dim", [False, True])
@pytest.mark.parametrize("values", [64, 128])
def test_bfloat16_on_the_device(values: int, per_dim: bool) -> None:
    device = torch.device("cuda")
    heads = Heads(32, 32, 128, 128) if per_dim else QWEN
    step = delta_step(
        [*RAGGED, 700],
        device,
        heads=heads,
        dtype=torch.bfloat16,
        per_dim=per_dim,
        fresh=[1, 5],
        checkpoints=[*CHECKPOINTS, (7, 512)],
    )
    options = {"VALUES": values, "num_warps": values // 16, "num_stages": 2}
    step.check(gpu.gated_delta, scan=options)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("per_dim", [False, True])
@pytest.mark.parametrize("heads", [QWEN, OLMO], ids=str)
@pytest.mark.parametrize(("values", "lanes", "warps"), [(16, 8, 1), (64, 8, 4), (64, 4, 2)])
def test_decodes_by_columns_on_the_device(heads: Heads, values: int, lanes: int, warps: int, per_dim: bool) -> None:
    step = delta_step(
        [1, 4, 0, 1, 3],
        torch.device("cuda"),
        heads=heads,
        dtype=torch.bfloat16,
        decode_tokens=4,
        per_dim=per_dim,
        fresh=[1],
    )
    step.check(gpu.gated_delta, step={"VALUES": values, "LANES": lanes, "num_warps": warps})


@pytest.mark.gpu
def test_head_dimensions_of_no_power_of_two_on_the_device() -> None:
    case = {"heads": OLMO, "beta_scale": 2.0, "fresh": [1, 5], "checkpoints": [*CHECKPOINTS, (7, 512)]}
    step = delta_step([*RAGGED, 700], torch.device("cuda"), dtype=torch.bfloat16, **case)  # type: ignore[arg-type]
    step.check(gpu.gated_delta)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1, 1, 1], [65, 130]])
def test_slots_past_4_gib_are_found(lengths: list[int]) -> None:
    device = torch.device("cuda")
    options = {"heads": QWEN, "dtype": torch.bfloat16}
    near = delta_step(lengths, device, **options)  # type: ignore[arg-type]
    far = delta_step(lengths, device, first_slot=(1 << 32) // near.state[0].numel() + 1, **options)  # type: ignore[arg-type]
    out, state = far.run(gpu.gated_delta)
    expected, expected_state = near.run(gpu.gated_delta)
    assert torch.equal(out, expected)
    assert torch.equal(state[far.written], expected_state[near.written])


@pytest.mark.gpu
def test_a_captured_graph_serves_later_slots() -> None:
    step = delta_step([1] * 8, torch.device("cuda"), heads=QWEN, dtype=torch.bfloat16)
    state = step.state.nan_to_num(0.5)

    def run() -> torch.Tensor:
        return gated_delta(step.q, step.k, step.v, step.gate, state, step.batch, scale=SCALE)

    assert_graph_serves_other_slots(run, state, step.batch)

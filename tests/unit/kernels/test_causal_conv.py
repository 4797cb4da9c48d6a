"""The causal convolution: the reference and its states, and C++ and Triton (interpreted without a GPU) against it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional

from baton.kernels.causal_conv import StateBatch, causal_conv, reference

from ...helpers.aot import compile_for_h200
from .conv_cases import conv_step

CPU = torch.device("cpu")
RAGGED = [1, 1, 0, 2, 3, 63, 64, 65, 200]
REPLAY = ("replay_rows", "replay_starts", "replay_counts")
CHECKPOINTS = [(3, 2), (6, 64), (8, 8), (8, 100), (8, 200)]


def test_the_definition_is_a_depthwise_convolution() -> None:
    step = conv_step([30], CPU, fresh=[0])
    out, _ = step.run(causal_conv)
    padded = functional.pad(step.x.T[None], (3, 0))
    expected = functional.silu(functional.conv1d(padded, step.weight[:, None], step.bias, groups=80))
    torch.testing.assert_close(out, expected[0].T)


@pytest.mark.parametrize("cuts", [[30], [1] * 30, [2, 1, 20, 7]])
def test_a_prompt_may_be_cut_anywhere(cuts: list[int]) -> None:
    step = conv_step([30], CPU)
    whole, whole_state = step.run(causal_conv)
    state, slot, first = step.state.clone(), step.batch.sources.tolist(), 0
    for length in cuts:
        tokens = slice(first, first + length)
        out = causal_conv(step.x[tokens], step.weight, state, StateBatch.plan([length], slot, slot), bias=step.bias)
        torch.testing.assert_close(out, whole[tokens])
        first += length
    assert torch.equal(state[slot], whole_state[slot])


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_cpu_convolves_ragged_sequences_with_states_and_checkpoints(width: int, dtype: torch.dtype) -> None:
    conv_step(RAGGED, CPU, width=width, dtype=dtype, fresh=[1, 5], checkpoints=CHECKPOINTS).check(causal_conv)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("channels", [3, 16, 256, 300])
def test_a_cpu_convolves_any_number_of_channels(channels: int, in_place: bool, num_threads: int) -> None:
    step = conv_step([1, 2, 200], CPU, channels=channels, in_place=in_place, with_bias=False)
    dataclasses.replace(step, silu=False).check(causal_conv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_cpu_a_token_gives_the_same_bits_however_its_prompt_is_cut(dtype: torch.dtype) -> None:
    step = conv_step([30], CPU, dtype=dtype)
    whole, whole_state = step.run(causal_conv)
    state, slot, first = step.state.clone(), step.batch.sources.tolist(), 0
    for length in (2, 1, 20, 7):
        tokens = slice(first, first + length)
        out = causal_conv(step.x[tokens], step.weight, state, StateBatch.plan([length], slot, slot), bias=step.bias)
        assert torch.equal(out, whole[tokens])
        first += length
    assert torch.equal(state[slot], whole_state[slot])


def test_torch_serves_tensors_of_several_types(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("in torch")

    monkeypatch.setattr(reference, "causal_conv", refused)
    step = conv_step([4], CPU, dtype=torch.bfloat16)
    step.run(causal_conv)
    with pytest.raises(AssertionError, match="in torch"):
        dataclasses.replace(step, weight=step.weight.float()).run(causal_conv)


def test_a_checkpoint_holds_the_inputs_before_it() -> None:
    step = conv_step([50], CPU, checkpoints=[(0, 20), (0, 50)])
    _, state = step.run(causal_conv)
    kept = [slot for slot in step.batch.checkpoints.tolist() if slot >= 0]
    assert torch.equal(state[kept[0]], step.x[17:20].T)
    assert torch.equal(state[kept[1]], step.x[47:50].T)
    assert torch.equal(state[step.batch.targets[0]], step.x[47:50].T)


def test_tensors_that_do_not_fit_are_refused() -> None:
    step = conv_step([4], CPU)
    with pytest.raises(ValueError, match="give contiguous"):
        causal_conv(step.x, step.weight[:, :1], step.state, step.batch)
    with pytest.raises(ValueError, match=r"give contiguous \[80, 3\] a slot"):
        causal_conv(step.x, step.weight, step.state[:, 1:], step.batch)
    with pytest.raises(ValueError, match=r"bias \[3\]"):
        causal_conv(step.x, step.weight, step.state, step.batch, bias=torch.zeros(3))
    with pytest.raises(ValueError, match="must be contiguous"):
        causal_conv(step.x.T.contiguous().T, step.weight, step.state, step.batch)


gpu = pytest.importorskip("baton.kernels.causal_conv.gpu")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_ragged_sequences_with_states_and_checkpoints(
    width: int, dtype: torch.dtype, triton_device: torch.device
) -> None:
    step = conv_step(RAGGED, triton_device, width=width, dtype=dtype, fresh=[1, 5], checkpoints=CHECKPOINTS)
    step.check(gpu.causal_conv)


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("channels", [16, 256, 300])
def test_channels_of_any_number(channels: int, in_place: bool, triton_device: torch.device) -> None:
    step = conv_step([1, 2, 20], triton_device, channels=channels, in_place=in_place, with_bias=False)
    dataclasses.replace(step, silu=False).check(gpu.causal_conv)


@pytest.mark.slow
def test_a_checkpoint_may_overwrite_the_state_that_was_read(triton_device: torch.device) -> None:
    checkpoints = [(0, 8), (1, 64), (2, 100), (2, 200)]
    step = conv_step([65, 130, 270], triton_device, checkpoints=checkpoints, in_place=False, keeps_in_source=True)
    assert set(step.batch.sources.tolist()) <= set(step.batch.checkpoints.tolist())
    step.check(gpu.causal_conv)
    step.check(causal_conv)


@pytest.mark.slow
def test_a_captured_step_of_any_mix_skips_its_padding(triton_device: torch.device) -> None:
    case = {"checkpoints": [(3, 64), (3, 80), (5, 8)], "fresh": [1, 5], "padding": 3}
    step = conv_step([1, 1, 1, 130, 1, 20], triton_device, **case)  # type: ignore[arg-type]
    assert (step.batch.least_decodes, step.batch.num_decodes.item(), step.batch.most_decodes) == (0, 3, 9)
    step.check(gpu.causal_conv)
    step.check(causal_conv)


def test_a_few_tokens_go_one_by_one(triton_device: torch.device) -> None:
    step = conv_step([5, 1, 0, 2, 3], triton_device, decode_tokens=5, fresh=[3])
    assert step.batch.num_decodes.item() == 5
    step.check(gpu.causal_conv)
    step.check(causal_conv)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [4, 64])
def test_options_change_nothing_but_the_time(rows: int, triton_device: torch.device) -> None:
    options = {"chunks": {"CHANNELS": 32, "ROWS": rows, "num_warps": 4}, "step": {"CHANNELS": 64, "num_warps": 1}}
    conv_step([1, 70], triton_device).check(gpu.causal_conv, **options)


def test_padding_of_a_captured_graph_writes_nothing(triton_device: torch.device) -> None:
    step = conv_step([1, 1, 1], triton_device, fresh=[1, 2])
    targets = step.batch.targets.clone()
    targets[2] = -1
    padded = dataclasses.replace(step, batch=dataclasses.replace(step.batch, targets=targets))
    padded.check(gpu.causal_conv)
    padded.check(causal_conv)


@pytest.mark.slow
def test_tokens_are_loaded_16_bytes_at_a_time() -> None:
    types = {
        **dict.fromkeys(("x", "weight", "bias", "state", "out", "drafts"), "*bf16"),
        **dict.fromkeys(("query_start", "sources", "targets", "num_decodes"), "*i32"),
        **dict.fromkeys(("chunk_start", "chunk_seqs", "checkpoints", *REPLAY), "*i32"),
        **dict.fromkeys(("x_stride", "state_stride", "out_stride", "drafts_stride"), "i32:16"),
    }
    constants = {"WIDTH": 4, "SILU": True, "NUM_CHANNELS": 8192}
    without = {"NUM_PLACES": 0, **dict.fromkeys(("drafts", *REPLAY))}
    for kernel, options in (
        (gpu.convolve_chunk_kernel, gpu.CHUNKS),
        (gpu.convolve_decode_kernel, gpu.STEP | without),
        (gpu.convolve_decode_kernel, gpu.STEP | {"NUM_PLACES": 7}),
    ):
        words = constants | {name: value for name, value in options.items() if name != "num_warps"}
        known = {name: kind for name, kind in types.items() if name in kernel.arg_names and name not in words}
        compiled = compile_for_h200(kernel, known, words, num_warps=options["num_warps"])
        assert compiled.widest_load_bytes >= 8
        assert "griddepcontrol.wait" in compiled.ptx


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("channels", [8192, 1000])
def test_bfloat16_on_the_device(channels: int) -> None:
    lengths = [*RAGGED, 1000]
    step = conv_step(lengths, torch.device("cuda"), channels=channels, dtype=torch.bfloat16, checkpoints=CHECKPOINTS)
    step.check(gpu.causal_conv)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1, 1], [65, 3]])
def test_slots_past_4_gib_are_found(lengths: list[int]) -> None:
    options = {"channels": 8192, "dtype": torch.bfloat16}
    near = conv_step(lengths, torch.device("cuda"), **options)  # type: ignore[arg-type]
    first = (1 << 32) // near.state[0].numel() + 1
    far = conv_step(lengths, torch.device("cuda"), first_slot=first, **options)  # type: ignore[arg-type]
    out, state = far.run(gpu.causal_conv)
    expected, expected_state = near.run(gpu.causal_conv)
    assert torch.equal(out, expected)
    assert torch.equal(state[first:].nan_to_num(7.0), expected_state.nan_to_num(7.0))

"""Experts are the same in every storage format of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.hf_config.errors import WeightsError
from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.hf_config.quantization import Quantization
from baton.engine.layers.base import Share
from baton.engine.layers.experts import Experts
from baton.engine.layers.fp8 import Fp8Experts
from baton.engine.layers.mxfp4 import dequantize
from baton.engine.models import load_config, load_model

from ...helpers.checkpoints import edit_config, make_model, write_checkpoint
from ...helpers.paged import chunked_logprobs, random_tokens, reference_logprobs

NUM_EXPERTS, HIDDEN_SIZE, WIDTH = 6, 64, 96
FORMS = {
    "each": {},
    "each, other names": {"projections": ("w1", "w3", "w2")},
    "stacked": {"stored": "stacked"},
    "transposed": {"stored": "transposed", "expert_biases": True},
    "mxfp4": {"stored": "mxfp4", "expert_biases": True},
}


def experts_of(form: str) -> Experts:
    config = ExpertsConfig(
        num_experts=NUM_EXPERTS,
        top_k=2,
        intermediate_size=WIDTH,
        shared_intermediate_size=0,
        sparse_layers=(True,),
        **FORMS[form],
    )
    return Experts(HIDDEN_SIZE, config)


IN_BLOCKS = Fp8Experts(Quantization(True, "weight_scale_inv", ()))


def in_8_bits(hidden_size: int = 256, width: int = 512) -> Experts:
    config = ExpertsConfig(
        num_experts=4, top_k=2, intermediate_size=width, shared_intermediate_size=0, sparse_layers=(True,)
    )
    return Experts(hidden_size, config)


def stored_tensors(experts: Experts) -> dict[str, Tensor]:
    """Return random tensors for all slots, by name."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for slot in experts.slots("experts"):
        if slot.takes_8_bits:
            tensors[slot.name] = torch.randn(slot.shape, generator=generator).to(torch.float8_e4m3fn)
            continue
        if slot.stored_as == ("U8",):
            low, high = (0, 256) if slot.name.endswith("blocks") else (120, 128)
            tensors[slot.name] = torch.randint(low, high, slot.shape, generator=generator, dtype=torch.uint8)
        else:
            tensors[slot.name] = torch.randn(slot.shape, generator=generator)
    return tensors


def fill(experts: Experts, tensors: dict[str, Tensor]) -> None:
    """Fill the slots, and bring the matrices into the kernels' layout."""
    place(experts, tensors)
    experts.finish()


def place(experts: Experts, tensors: dict[str, Tensor]) -> None:
    """Fill the slots as the loader does, reading only the rank's part of each tensor."""
    experts.allocate("cpu", torch.float32)
    for slot in experts.slots("experts"):
        if slot.num_elements:
            tensor = tensors[slot.name]
            index = slot.index(tuple(tensor.shape))
            slot.place(tensor[index] if index else tensor)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare up to the order of sums, whose terms may be larger than the sum."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("held", [(2, 3, 4), (5, 0, 1), (3,)], ids=str)
def test_a_rank_holds_the_experts_that_it_keeps(form: str, held: tuple[int, ...]) -> None:
    whole, some = experts_of(form), experts_of(form)
    tensors = stored_tensors(whole)
    place(whole, tensors)
    some.keep_experts(held)
    assert {slot.name: slot.shape for slot in some.slots("experts")} == {n: tuple(t.shape) for n, t in tensors.items()}
    place(some, tensors)
    for (name, parameter), (_, kept) in zip(whole.parameters(), some.parameters(), strict=True):
        assert torch.equal(kept.data, parameter.data[list(held)]), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("start", "size"), [(0, 48), (48, 48), (40, 8)])  # the last one cuts a group of 32
def test_slices_of_the_width_of_all_experts_hold_the_slices_of_their_weights(form: str, start: int, size: int) -> None:
    whole, part = experts_of(form), experts_of(form)
    tensors = stored_tensors(whole)
    place(whole, tensors)
    part.keep_width(Share(start, size, WIDTH))
    place(part, tensors)
    rows = slice(2 * start, 2 * (start + size))
    assert torch.equal(part.weights["gate_up"].data, whole.weights["gate_up"].data[:, rows])
    assert torch.equal(part.weights["down"].data, whole.weights["down"].data[:, :, start : start + size])
    if whole.gate_up_bias is not None:
        assert part.gate_up_bias is not None
        assert torch.equal(part.gate_up_bias.data, whole.gate_up_bias.data[:, rows])


@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_slices_of_the_width_add_up(form: str) -> None:
    whole, parts = experts_of(form), [experts_of(form), experts_of(form)]
    tensors = stored_tensors(whole)
    fill(whole, tensors)
    hidden, weights = torch.randn(5, HIDDEN_SIZE), torch.rand(5, 2)
    expert_ids = torch.rand(5, NUM_EXPERTS).argsort(-1)[:, :2].int()
    total = torch.zeros(5, HIDDEN_SIZE)
    for rank, part in enumerate(parts):
        part.keep_width(Share(rank * WIDTH // 2, WIDTH // 2, WIDTH))
        fill(part, tensors)
        part(hidden, expert_ids, weights, total)
    assert_close(total, whole(hidden, expert_ids, weights, None))


@pytest.mark.parametrize("held", [(0, 1, 2, 3), (3, 1)], ids=str)
def test_ranks_hold_scales_with_their_weights(held: tuple[int, ...]) -> None:
    whole = in_8_bits()
    whole.use(IN_BLOCKS)
    tensors = stored_tensors(whole)
    fill(whole, tensors)
    hidden, weights = torch.randn(5, 256), torch.rand(5, 1)
    places = torch.randint(0, len(held), (5, 1))
    expected = whole(hidden, torch.tensor(held)[places].int(), weights, None)
    total = torch.zeros(5, 256)
    for rank in range(2):
        part = in_8_bits()
        part.keep_experts(held)
        part.keep_width(Share(rank * 256, 256, 512))
        assert IN_BLOCKS.fits(part.shape)
        part.use(IN_BLOCKS)
        assert {slot.name: slot.shape for slot in part.slots("experts")} == {n: t.shape for n, t in tensors.items()}
        fill(part, tensors)
        part(hidden, places.int(), weights, total)
    assert_close(total, expected)


def test_a_slice_that_cuts_blocks_takes_no_fp8() -> None:
    part = in_8_bits()
    part.keep_width(Share(64, 64, 512))
    assert not IN_BLOCKS.fits(part.shape)
    assert not IN_BLOCKS.fits(in_8_bits(hidden_size=192).shape)


def test_gates_and_ups_of_a_stack_come_next_to_each_other() -> None:
    experts = experts_of("stacked")
    tensors = stored_tensors(experts)
    place(experts, tensors)
    gates, ups = tensors["experts.gate_up_proj"].chunk(2, dim=1)
    assert torch.equal(experts.weights["gate_up"].data[:, 0::2], gates)
    assert torch.equal(experts.weights["gate_up"].data[:, 1::2], ups)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3"])
def test_stacks_as_transformers_5_writes_them_are_the_experts_one_by_one(architecture: str, tmp_path: Path) -> None:
    single = write_checkpoint(tmp_path / "single", architecture)
    make_model(architecture).save_pretrained(tmp_path / "stacked", save_original_format=False)
    names = list(load_file(tmp_path / "stacked" / "model.safetensors"))
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    tokens = random_tokens(40)
    first, second = (
        chunked_logprobs(load_model(load_config(folder)), tokens, 16) for folder in (single, tmp_path / "stacked")
    )
    assert torch.equal(first, second)


def write_mxfp4_checkpoint(folder: Path, **config: Any) -> tuple[Path, Path]:
    """Write a gpt-oss checkpoint in MXFP4, and a plain one with the values that `transformers` reads from it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed_folder = write_checkpoint(folder / "packed", "gpt_oss", **config)
    plain_folder = write_checkpoint(folder / "plain", "gpt_oss", **config)
    packed = load_file(packed_folder / "model.safetensors")
    plain = dict(packed)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = packed.pop(name).shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(packed, packed_folder / "model.safetensors")
    save_file(plain, plain_folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(packed_folder, quantization_config={"quant_method": "mxfp4"})
    return packed_folder, plain_folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_experts_in_4_bits_are_dequantized(dtype: str, tmp_path: Path) -> None:
    packed, plain = write_mxfp4_checkpoint(tmp_path)
    tokens = random_tokens(40)
    first, second = (
        chunked_logprobs(load_model(load_config(folder, dtype=dtype)), tokens, 16) for folder in (packed, plain)
    )
    assert torch.equal(first, second)


def test_experts_in_4_bits_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    packed, plain = write_mxfp4_checkpoint(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = random_tokens(60)
    ours = chunked_logprobs(load_model(load_config(packed)), tokens, 16)
    assert (ours - reference_logprobs(reference, tokens)).abs().max() < 1e-4


def test_every_byte_and_scale_is_decoded_as_the_format_defines() -> None:
    byte = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    scales = torch.arange(120, 136, dtype=torch.uint8).view(16, 1)
    values = dequantize(byte, scales, torch.float32).view(256, 2)
    for index in range(256):
        power = 2.0 ** (index // 16 + 120 - 127)
        for half, code in enumerate((index & 15, index >> 4)):
            exponent, mantissa = (code >> 1) & 3, code & 1
            magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
            assert values[index, half] == (-magnitude if code & 8 else magnitude) * power


def test_blocks_without_scales_and_scales_of_another_dtype_are_named(tmp_path: Path) -> None:
    folder, _ = write_mxfp4_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    scales = tensors.pop(f"{name}_scales")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"1 missing: {name}_scales"):
        load_model(load_config(folder))
    save_file({**tensors, f"{name}_scales": scales.float()}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"1 of another type: {name}_scales F32 instead of U8"):
        load_model(load_config(folder))


def test_dummy_weights_of_a_config_in_4_bits_are_plain_ones(tmp_path: Path) -> None:
    folder, _ = write_mxfp4_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    model = load_model(load_config(folder, load_format="dummy"))
    assert chunked_logprobs(model, random_tokens(20), 20).isfinite().all()


def test_multi_token_prediction_layers_are_accepted_and_not_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "deepseek_v3")
    expected = chunked_logprobs(load_model(load_config(folder)), random_tokens(20), 20)
    tensors = load_file(folder / "model.safetensors")
    extra = {
        "model.layers.3.eh_proj.weight": torch.zeros(64, 128),
        "model.layers.3.shared_head.norm.weight": torch.ones(64),
    }
    save_file({**tensors, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    assert torch.equal(chunked_logprobs(load_model(load_config(folder)), random_tokens(20), 20), expected)
    further = {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}
    save_file({**tensors, **further}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"1 not part of the model: model\.layers\.4\.eh_proj\.weight"):
        load_model(load_config(folder))

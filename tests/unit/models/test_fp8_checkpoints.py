"""FP8 checkpoints: weights stay FP8 on a device with kernels for them, and are dequantized elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.hf_config.errors import InvalidModelConfig, UnsupportedModel, WeightsError
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.quantization import read_quantization
from baton.engine.layers.base import layers_of
from baton.engine.layers.experts import Experts
from baton.engine.layers.fp8 import Fp8Linear, Fp8LinearWeight
from baton.engine.layers.linear import Linear
from baton.engine.models import load_config, load_model

from ...helpers.checkpoints import edit_config, write_checkpoint
from ...helpers.fp8_checkpoints import BLOCKS, FORMATS, SHAPE, compressed_tensors, quantized, write_fp8_checkpoint
from ...helpers.paged import chunked_logprobs, random_tokens


@pytest.mark.parametrize("form", FORMATS)
def test_on_a_cpu_an_fp8_checkpoint_gives_the_logprobs_of_its_dequantized_values(tmp_path: Path, form: str) -> None:
    in_8_bits, plain = (
        load_model(load_config(folder, dtype="float32")) for folder in write_fp8_checkpoint(tmp_path, form)
    )
    tokens = random_tokens(20)
    assert torch.equal(chunked_logprobs(in_8_bits, tokens, 20), chunked_logprobs(plain, tokens, 20))


@pytest.mark.usefixtures("keeps_8_bits")
@pytest.mark.parametrize("form", FORMATS)
def test_an_fp8_model_differs_by_the_quantization_of_its_inputs_only(tmp_path: Path, form: str) -> None:
    folder, plain_folder = write_fp8_checkpoint(tmp_path, form, attention_bias=True)
    model = load_model(load_config(folder, dtype="float32"))
    kept = {path for path, layer in layers_of(Linear, model) if isinstance(layer.method, Fp8Linear)}
    projections = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert kept == {f"model.layers.{layer}.{name}" for layer in range(2) for name in projections}

    plain = load_model(load_config(plain_folder, dtype="float32"))
    tokens = random_tokens(20)
    logprobs, expected = (chunked_logprobs(which, tokens, 20) for which in (model, plain))
    error = (logprobs - expected).std() / expected.std()
    assert 0 < error < 0.1


@pytest.mark.usefixtures("keeps_8_bits")
@pytest.mark.parametrize("form", FORMATS)
def test_every_part_of_a_merged_layer_gets_its_own_scales(tmp_path: Path, form: str) -> None:
    folder, plain_folder = write_fp8_checkpoint(tmp_path, form)
    attention = load_model(load_config(folder)).model.layers[1].self_attn
    tensors = load_file(plain_folder / "model.safetensors")
    parts = [tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    weight = attention.qkv_proj.packed
    assert isinstance(weight, Fp8LinearWeight)
    assert torch.equal(weight.weight.dequantize(torch.float32), torch.cat(parts))


@pytest.mark.parametrize("form", FORMATS)
def test_factors_of_outputs_go_into_scales(form: str) -> None:
    quantization = read_quantization(Keys("config.json", {"quantization_config": FORMATS[form]}), ())
    assert quantization is not None
    weight, x = torch.randn(384, 256), torch.randn(3, 256)
    data, scale = quantized(weight, form)
    results = []
    for factors in ([(384, 1.0)], [(384, 0.6)], [(128, 1.0), (256, 0.6)]):
        layer = Linear(256, 384)
        layer.use(Fp8Linear(quantization))
        layer.allocate("cpu", torch.float32)
        for slot, tensor in zip(layer.slots("layer"), (data, scale), strict=True):
            slot.place(tensor)
        layer.multiply_rows(factors)
        layer.finish()
        results.append(layer(x))
    whole, multiplied, of_some = results
    rounding = {"atol": 256 * 2**-22, "rtol": 1e-5}  # of sums of 256 products of magnitude 1 or somewhat more
    torch.testing.assert_close(multiplied, 0.6 * whole, **rounding)
    torch.testing.assert_close(of_some, torch.cat([whole[:, :128], 0.6 * whole[:, 128:]], 1), **rounding)


@pytest.mark.usefixtures("keeps_8_bits")
def test_parts_that_would_share_a_block_are_dequantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, plain_folder = write_fp8_checkpoint(tmp_path, "blocks", num_key_value_heads=1)
    model = load_model(load_config(folder, dtype="float32"))
    methods = {path: layer.method for path, layer in layers_of(Linear, model)}
    assert not isinstance(methods["model.layers.0.self_attn.qkv_proj"], Fp8Linear)
    assert isinstance(methods["model.layers.0.self_attn.o_proj"], Fp8Linear)
    names = ", ".join(f"model.layers.{layer}.self_attn.qkv_proj" for layer in range(2))
    assert [message.rpartition(": ")[2] for message in caplog.messages] == [names]
    plain = load_model(load_config(plain_folder, dtype="float32"))
    tokens = random_tokens(20)
    logprobs, expected = (chunked_logprobs(which, tokens, 20) for which in (model, plain))
    assert (logprobs - expected).std() / expected.std() < 0.1


# Sizes are multiples of blocks where the original's are; its latents have 64 rotary dimensions.
DEEPSEEK_V3 = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
    "moe_intermediate_size": 128,
}


@pytest.mark.parametrize(
    ("architecture", "form", "config"),
    [("qwen3_moe", "rows", {}), ("mixtral", "whole", {}), ("deepseek_v3", "blocks", DEEPSEEK_V3)],
)
def test_fp8_experts_are_dequantized_on_a_cpu(
    tmp_path: Path, architecture: str, form: str, config: dict[str, Any]
) -> None:
    in_8_bits, plain = (
        load_model(load_config(folder, dtype="float32"))
        for folder in write_fp8_checkpoint(tmp_path, form, architecture, **config)
    )
    tokens = random_tokens(20)
    assert torch.equal(chunked_logprobs(in_8_bits, tokens, 20), chunked_logprobs(plain, tokens, 20))


QWEN3_MOE = {"moe_intermediate_size": 128}


@pytest.mark.usefixtures("keeps_8_bits")
@pytest.mark.parametrize(
    ("architecture", "form", "config"),
    [
        ("qwen3_moe", "blocks", QWEN3_MOE),
        ("qwen3_moe", "compressed blocks", QWEN3_MOE),
        ("mixtral", "blocks", {"intermediate_size": 128}),
        ("deepseek_v3", "blocks", DEEPSEEK_V3),
    ],
)
def test_fp8_experts_equal_their_dequantized_values(
    tmp_path: Path, architecture: str, form: str, config: dict[str, Any]
) -> None:
    folder, plain_folder = write_fp8_checkpoint(tmp_path, form, architecture, **config)
    kept, plain = (
        [experts for _, experts in layers_of(Experts, load_model(load_config(which, dtype="float32")))]
        for which in (folder, plain_folder)
    )
    assert len(kept) == len(plain) > 0
    hidden = torch.randn(6, SHAPE["hidden_size"])
    expert_ids, weights = torch.arange(6, dtype=torch.int32)[:, None], torch.rand(6, 1)
    for narrow, wide in zip(kept, plain, strict=True):
        assert {narrow.weights[name].data.dtype for name in ("gate_up", "down")} == {torch.float8_e4m3fn}
        assert wide.weights["gate_up"].data.dtype == torch.float32
        result, expected = (experts(hidden, expert_ids, weights, None) for experts in (narrow, wide))
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("keeps_8_bits")
def test_experts_with_scales_that_no_kernel_supports_are_dequantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = write_fp8_checkpoint(tmp_path, "rows", "qwen3_moe", **QWEN3_MOE)
    for _, experts in layers_of(Experts, load_model(load_config(folder, dtype="float32"))):
        assert experts.weights["gate_up"].data.dtype == torch.float32
    names = ", ".join(f"model.layers.{layer}.mlp.experts" for layer in range(2))
    assert [message.rpartition(": ")[2] for message in caplog.messages] == [names]


@pytest.mark.usefixtures("keeps_8_bits")
@pytest.mark.parametrize("form", FORMATS)
def test_dummy_weights_have_the_format_of_the_config(tmp_path: Path, form: str) -> None:
    folder, _ = write_fp8_checkpoint(tmp_path, form)
    model = load_model(load_config(folder, load_format="dummy", dtype="float32"))
    kinds = {path.rpartition(".")[2]: isinstance(layer.method, Fp8Linear) for path, layer in layers_of(Linear, model)}
    expected = {"qkv_proj": True, "o_proj": True, "gate_up_proj": True, "down_proj": True, "lm_head": False}
    assert kinds == expected
    assert not chunked_logprobs(model, random_tokens(5), 5).isnan().any()


def test_the_type_of_activations_is_not_that_of_the_weights(tmp_path: Path) -> None:
    folder, _ = write_fp8_checkpoint(tmp_path, "rows")
    edit_config(folder, dtype=None, torch_dtype=None)
    assert load_config(folder).dtype == "float32"


def test_a_weight_in_8_bits_without_scales_is_named(tmp_path: Path) -> None:
    folder, _ = write_fp8_checkpoint(tmp_path, "rows")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"1 tensors of F8_E4M3 without scales: model\.layers\.0\.mlp\.down_proj"):
        load_model(load_config(folder))


def test_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder, _ = write_fp8_checkpoint(tmp_path, "rows")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight_scale"] = torch.ones(3, 1)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="scales"):
        load_model(load_config(folder))


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"quant_method": "awq"}, "awq"),
        ({**BLOCKS, "fmt": "e5m2"}, "e5m2"),
        ({**BLOCKS, "weight_block_size": [64, 64]}, r"\[64, 64\]"),
        ({**compressed_tensors("channel"), "format": "pack-quantized"}, "pack-quantized"),
        (compressed_tensors("channel", num_bits=4), "weights of type 'float' with num_bits 4"),
        (compressed_tensors("group"), "strategy 'group'"),
    ],
)
def test_other_quantizations_are_refused_by_name(described: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_quantization(Keys("config.json", {"quantization_config": described}))


@pytest.mark.parametrize(
    "described",
    [
        {**BLOCKS, "weight_block_size": "128x128"},
        compressed_tensors("block", block_structure="128x128"),
    ],
)
def test_a_block_size_that_is_a_string_is_refused_with_a_valid_example(described: dict[str, Any]) -> None:
    with pytest.raises(InvalidModelConfig, match=r"must be a list .* such as \[128, 128\], not the text '128x128'"):
        read_quantization(Keys("config.json", {"quantization_config": described}))


@pytest.mark.parametrize(
    ("ignored", "layer", "covered"),
    [
        ("model.layers.0.mlp", "model.layers.0.mlp.down_proj", False),
        ("model.layers.1", "model.layers.10.mlp.down_proj", True),
        ("down_proj", "model.layers.3.mlp.down_proj", False),
        (r"re:.*self_attn.*", "model.layers.3.self_attn.o_proj", False),
        (r"re:.*self_attn.*", "model.layers.3.mlp.up_proj", True),
        ("nothing", "lm_head", False),
        ("nothing", "model.layers.3.mlp.gate", False),
        ("nothing", "model.layers.3.mlp.gate_proj", True),
    ],
)
def test_layers_can_be_left_unquantized_by_name_part_or_pattern(ignored: str, layer: str, covered: bool) -> None:
    keys = Keys("config.json", {"quantization_config": {**BLOCKS, "modules_to_not_convert": [ignored]}})
    quantization = read_quantization(keys)
    assert quantization is not None
    assert quantization.covers(layer) is covered


def test_an_fp8_cache_gives_nearly_the_same_logprobs(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    config = load_config(folder)
    wide, narrow = load_model(config), load_model(config.with_fp8_cache())
    tokens = random_tokens(40)
    logprobs, expected = (chunked_logprobs(model, tokens, 16) for model in (narrow, wide))
    error = (logprobs - expected).std() / expected.std()
    assert 0 < error < 0.1


def test_an_fp8_cache_of_latents_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "deepseek_v3")
    with pytest.raises(UnsupportedModel, match="kv_cache_dtype must be 'auto': caches of latents"):
        load_config(folder).with_fp8_cache()


def test_scales_of_an_fp8_cache_keep_values_in_its_range(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn"
        tensors[f"{name}.v_proj.weight"] *= 1000.0
        tensors[f"{name}.o_proj.weight"] /= 1000.0
        tensors[f"{name}.k_scale"] = torch.tensor([0.25])
        tensors[f"{name}.v_scale"] = torch.tensor(1000.0)
    save_file(tensors, folder / "model.safetensors")
    config = load_config(folder)
    wide, narrow = load_model(config), load_model(config.with_fp8_cache())
    scale = narrow.model.layers[0].self_attn.v_scale
    assert scale is not None
    assert scale.data.tolist() == [1000.0]
    assert wide.model.layers[0].self_attn.v_scale is None
    tokens = random_tokens(40)
    logprobs, expected = (chunked_logprobs(model, tokens, 16) for model in (narrow, wide))
    assert (logprobs - expected).std() / expected.std() < 0.1

"""FP8 checkpoints of families that fuse or split projections in their own ways, with the published layouts."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.config import EngineConfig
from baton.engine.hf_config.errors import UnsupportedModel, WeightsError
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.base import Layer, layers_of
from baton.engine.layers.decoder import CausalLM
from baton.engine.layers.experts import Experts
from baton.engine.layers.fp8 import Fp8Experts, Fp8Linear
from baton.engine.layers.linear import Linear
from baton.engine.models import load_config, load_model
from baton.engine.parallel.groups import ParallelGroups
from baton.engine.startup.weight_counts import weights_of_rank

from ...helpers.checkpoints import edit_config
from ...helpers.fp8_checkpoints import MODELOPT, write_fp8_checkpoint
from ...helpers.paged import chunked_logprobs, random_tokens
from ...helpers.thread_groups import run_ranks
from ...helpers.tiny_shapes import DIFFERENCES, SHAPE, wide_shape


class Published(NamedTuple):
    """One family's checkpoint: its format of weights, the layers that are plain in it, and those that we hold plain."""

    architecture: str
    form: str
    keep: tuple[str, ...]
    config: dict[str, Any]
    stays_plain: tuple[str, ...]  # suffixes of paths
    multiplied_out: tuple[str, ...] = ()  # those of `stays_plain` that are FP8 in the checkpoint


TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
FAMILIES = {
    # Qwen/Qwen3-Next-80B-A3B-Instruct-FP8
    "qwen3_next": Published(
        "qwen3_next",
        "blocks",
        ("*.in_proj_ba",),
        {**TWO_LAYERS, "shared_expert_intermediate_size": 128, "mlp_only_layers": []},
        ("linear_attn.gate_proj", "shared_expert_gate"),
    ),
    # Qwen/Qwen3.5-35B-A3B-FP8
    "qwen3_5_moe": Published(
        "qwen3_5_moe_text",
        "blocks",
        ("*.in_proj_a", "*.in_proj_b"),
        {**TWO_LAYERS, "shared_expert_intermediate_size": 128},
        ("linear_attn.gate_proj", "shared_expert_gate"),
    ),
    # Qwen/Qwen3.5-27B-FP8
    "qwen3_5": Published(
        "qwen3_5_text", "blocks", ("*.in_proj_a", "*.in_proj_b"), TWO_LAYERS, ("linear_attn.gate_proj",)
    ),
    # llm-compressor
    "qwen3_5 rows": Published("qwen3_5_text", "rows", (), TWO_LAYERS, ()),
    # XiaomiMiMo/MiMo-V2-Flash
    "mimo_v2_flash": Published(
        "mimo_v2_flash",
        "blocks",
        ("*.self_attn.o_proj",),
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
        ("self_attn.o_proj",),
    ),
    "kimi_linear": Published("kimi_linear", "compressed blocks", (), TWO_LAYERS, ()),
    # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8, whose experts have no latents and are not as wide as blocks
    "nemotron_h": Published(
        "nemotron_h",
        "modelopt",
        ("backbone.layers.2.mixer*", "*.4.mixer.in_proj"),
        {"moe_latent_size": None, "moe_intermediate_size": 160},
        ("2.mixer.qkv_proj", "2.mixer.o_proj", "4.mixer.in_proj"),
    ),
    "nemotron_h blocks": Published(
        "nemotron_h",
        "compressed blocks",
        ("*.fc?_latent_proj",),
        {"moe_shared_expert_intermediate_size": 128},
        ("fc1_latent_proj", "fc2_latent_proj"),
    ),
    # ibm-granite/granite-4.0-h-small-FP8
    "granitemoehybrid": Published(
        "granitemoehybrid", "rows", (), {"num_hidden_layers": 3}, ("block_sparse_moe",), ("block_sparse_moe",)
    ),
    "falcon_h1": Published("falcon_h1", "compressed blocks", (), {"num_hidden_layers": 2}, ()),
    # Its multipliers are for parts of one matrix, and C begins within a block of scales here.
    "falcon_h1 parts": Published(
        "falcon_h1",
        "compressed blocks",
        (),
        {"num_hidden_layers": 2, "mamba_d_state": 32},
        ("mamba.in_proj",),
        ("mamba.in_proj",),
    ),
    "bamba": Published("bamba", "rows", (), {}, ()),
    "olmo_hybrid": Published("olmo_hybrid", "rows", (), TWO_LAYERS, ()),
    "gemma4": Published("gemma4_text", "rows", (), {"num_hidden_layers": 6}, ()),
    # Rows of queries and keys are reordered, in blocks and with their scales.
    "glm4": Published("glm4", "compressed blocks", (), {}, ()),
    "glm4 rows": Published("glm4", "rows", (), {}, ()),
    # MiniMaxAI/MiniMax-M2
    "minimax_m2": Published("minimax_m2", "blocks", (), {}, ()),
    # zai-org/GLM-4.5-FP8
    "glm4_moe": Published("glm4_moe", "rows", (), {}, ("mlp.experts",), ("mlp.experts",)),
    "gpt_oss": Published("gpt_oss", "whole", (), {}, ("mlp.experts",)),
}
FoldersOf = Callable[[str], tuple[Path, Path]]
EACH = pytest.mark.parametrize("family", FAMILIES)


def write(folder: Path, family: str, *, drafts: bool = False, **changes: Any) -> tuple[Path, Path]:
    published = FAMILIES[family]
    config = {**wide_shape(published.architecture), **published.config, **changes}
    return write_fp8_checkpoint(
        folder, published.form, published.architecture, keep=published.keep, drafts=drafts, **config
    )


@pytest.fixture(scope="module")
def folders_of(tmp_path_factory: pytest.TempPathFactory) -> FoldersOf:
    """Return a function that writes the checkpoints of a family once."""
    return functools.cache(lambda family: write(tmp_path_factory.mktemp("model"), family))


@pytest.mark.exhaustive
@EACH
def test_a_published_checkpoint_gives_the_logprobs_of_its_dequantized_values(
    family: str, folders_of: FoldersOf
) -> None:
    in_8_bits, plain = (load_model(load_config(folder, dtype="float32")) for folder in folders_of(family))
    tokens = random_tokens(20)
    logprobs, expected = (chunked_logprobs(model, tokens, 9) for model in (in_8_bits, plain))
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("keeps_8_bits")
@EACH
def test_on_a_gpu_only_plain_layers_and_those_without_a_kernel_are_plain(
    family: str, folders_of: FoldersOf, caplog: pytest.LogCaptureFixture
) -> None:
    published = FAMILIES[family]
    folder, plain_folder = folders_of(family)
    model = load_model(load_config(folder, dtype="float32"))
    plain = plain_layers(model)
    assert all(path.endswith(published.stays_plain) for path in plain if path != "lm_head"), plain
    assert all(any(path.endswith(end) for path in plain) for end in published.stays_plain)
    assert planned_bytes(model.config, 1) == pytest.approx(held_bytes(model), rel=0.02)
    told = sorted(path for path in plain if path.endswith(published.multiplied_out)) if published.multiplied_out else []
    assert [message.rpartition(": ")[2] for message in caplog.messages] == ([", ".join(told)] if told else [])
    tokens = random_tokens(20)
    expected = chunked_logprobs(load_model(load_config(plain_folder, dtype="float32")), tokens, 20)
    assert 0 < distance(chunked_logprobs(model, tokens, 20), expected) < 0.25


@pytest.mark.gpu
@EACH
def test_errors_on_a_gpu_in_chunks_and_token_by_token_are_those_of_fp8(family: str, folders_of: FoldersOf) -> None:
    folder, plain_folder = folders_of(family)
    model = load_model(load_config(folder, dtype="bfloat16"), device="cuda")
    assert all(path.endswith(FAMILIES[family].stays_plain) for path in plain_layers(model) if path != "lm_head")
    tokens = random_tokens(250)
    expected = chunked_logprobs(load_model(load_config(plain_folder, dtype="float32")), tokens, 250)
    for chunk in (250, 37, 1):
        logprobs = chunked_logprobs(model, tokens, chunk).float().cpu()
        assert not logprobs.isnan().any()
        assert 0 < distance(logprobs, expected) < 0.25


def planned_bytes(config: ModelConfig, ranks: int) -> int:
    engine = EngineConfig(model=str(config.folder), tensor_parallel_size=ranks)
    return weights_of_rank(config, engine).num_bytes(config, has_fp8=True)


def held_bytes(model: CausalLM) -> int:
    return sum(slot.num_bytes(torch.float32) for slot in model.slots())


def plain_layers(model: Layer) -> set[str]:
    linear = {path for path, layer in layers_of(Linear, model) if not isinstance(layer.method, Fp8Linear)}
    return linear | {path for path, layer in layers_of(Experts, model) if not isinstance(layer.method, Fp8Experts)}


def distance(logprobs: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the median error relative to the standard deviation of the logprobs."""
    return float((logprobs - expected).abs().median() / expected.std())


@pytest.mark.parametrize("family", ["qwen3_next", "mimo_v2_flash", "nemotron_h", "granitemoehybrid", "kimi_linear"])
def test_ranks_dequantize_their_shares(family: str, folders_of: FoldersOf) -> None:
    folder, plain_folder = folders_of(family)
    tokens = random_tokens(20)
    expected = chunked_logprobs(load_model(load_config(plain_folder, dtype="float32")), tokens, 20)
    for logprobs in run_ranks(lambda groups: logprobs_of_rank(folder, groups, tokens), tp=2):
        torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("keeps_8_bits")
@pytest.mark.parametrize(
    ("family", "changes", "cut"),
    [
        (
            "qwen3_next",
            {"head_dim": 128, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
            (),
        ),
        ("nemotron_h", {}, ()),
        ("mimo_v2_flash", {"moe_intermediate_size": 256}, ("0.self_attn.qkv_proj",)),  # a rank has 192 rows of keys
        ("falcon_h1", {"head_dim": 128}, ("mamba.in_proj",)),  # a rank has 4 of 8 time steps
    ],
)
def test_layers_whose_blocks_ranks_would_cut_are_dequantized_and_logged(
    tmp_path: Path, family: str, changes: dict[str, Any], cut: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    folder, plain_folder = write(tmp_path, family, **changes)
    tokens = random_tokens(20)
    whole = load_model(load_config(plain_folder, dtype="float32"))
    expected = chunked_logprobs(whole, tokens, 20)

    def work(groups: ParallelGroups) -> tuple[set[str], torch.Tensor]:
        model = load_model(load_config(folder, dtype="float32"), groups=groups)
        assert planned_bytes(model.config, 2) == pytest.approx(held_bytes(model), rel=0.02)
        return plain_layers(model), chunked_logprobs(model, tokens, 20, rank=groups.tp.rank, num_ranks=2)

    multiplied_out = [path for path, _ in layers_of(Linear, whole) if cut and path.endswith(cut)]
    for plain, logprobs in run_ranks(work, tp=2):
        kept = FAMILIES[family].stays_plain
        assert {path for path in plain if not kept or not path.endswith(kept)} == {*multiplied_out, "lm_head"}
        assert distance(logprobs, expected) < 0.25
    told = {message.rpartition(": ")[2] for message in caplog.messages}
    assert told == ({", ".join(multiplied_out)} if cut else set())


def logprobs_of_rank(folder: Path, groups: ParallelGroups, tokens: list[int]) -> torch.Tensor:
    model = load_model(load_config(folder, dtype="float32"), groups=groups)
    return chunked_logprobs(model, tokens, 20, rank=groups.tp.rank, num_ranks=groups.tp.size)


def test_a_draft_layer_in_8_bits_is_read_with_its_scales(tmp_path: Path) -> None:
    """Without drafts neither the layer nor its scales are read."""
    config = {**wide_shape("qwen3_next"), "shared_expert_intermediate_size": 128, "mlp_only_layers": []}
    folders = write_fp8_checkpoint(tmp_path, "blocks", "qwen3_next", keep=["*.in_proj_ba"], drafts=True, **config)
    heads = []
    for folder in folders:
        model = load_model(load_config(folder, dtype="float32").with_draft_layers())
        (head,) = model.draft_heads
        heads.append((layers_of(Linear, head), layers_of(Experts, head)))
    (linear, [(_, experts)]), (plain_linear, [(_, plain_experts)]) = heads
    assert len(linear) == len(plain_linear) > 4
    for (_, layer), (_, plain) in zip(linear, plain_linear, strict=True):
        x = torch.randn(3, layer.in_features)
        assert torch.equal(layer(x), plain(x))
    x, chosen = torch.randn(6, 256), torch.arange(6, dtype=torch.int32)[:, None]
    results = [layer(x, chosen, torch.ones(6, 1), None) for layer in (experts, plain_experts)]
    assert torch.equal(*results)
    load_model(load_config(folders[0], dtype="float32"))


def test_names_of_plain_layers_in_a_multimodal_checkpoint_apply_to_its_text_part(tmp_path: Path) -> None:
    """Qwen/Qwen3.5-35B-A3B-FP8 is such a model: the names in its list begin with `model.language_model`."""
    folder, _ = write(tmp_path, "qwen3_5_moe")
    text = json.loads((folder / "config.json").read_text())
    described = text.pop("quantization_config")
    names = [name.replace("model.", "model.language_model.", 1) for name in described["modules_to_not_convert"]]
    described["modules_to_not_convert"] = [*names, "model.visual.blocks.0.attn.qkv"]
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": text,
        "quantization_config": described,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    quantization = load_config(folder, load_format="dummy").quantization
    assert quantization is not None
    assert not quantization.covers("model.layers.0.linear_attn.in_proj_a")
    assert quantization.covers("model.layers.0.linear_attn.in_proj_qkv")


@pytest.mark.usefixtures("keeps_8_bits")
def test_the_quantization_file_of_model_optimizer_is_read(tmp_path: Path) -> None:
    """Its patterns of plain layers with "*" and its names of cache scales are read as well."""
    folder, _ = write(tmp_path, "nemotron_h")
    described = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config=None)
    excluded = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": described["ignore"]}
    file = folder / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": excluded}))
    tensors = load_file(folder / "model.safetensors")
    for part, scale in ("k", 0.25), ("v", 2.0):
        tensors[f"backbone.layers.2.mixer.{part}_proj.{part}_scale"] = torch.tensor(scale)
    save_file(tensors, folder / "model.safetensors")
    config = load_config(folder, dtype="float32").with_fp8_cache()
    assert config.quantization is not None
    assert not config.quantization.covers("backbone.layers.2.mixer.q_proj")
    assert config.quantization.covers("backbone.layers.0.mixer.in_proj")
    attention = load_model(config).model.layers[2].mixer
    assert (attention.k_scale.data.item(), attention.v_scale.data.item()) == (0.25, 2.0)
    load_model(load_config(folder))  # scales of a cache that is not FP8 are ignored
    file.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    assert load_config(folder, load_format="dummy").quantization is None


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({**MODELOPT, "quant_algo": "NVFP4"}, "quant_algo 'NVFP4' of modelopt"),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, "quant_algo 'MIXED_PRECISION'"),
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
    ],
)
@pytest.mark.parametrize("architecture", ["NemotronHForCausalLM", "Qwen3NextForCausalLM"])
def test_other_quantizations_of_hybrids_are_refused_by_name(
    tmp_path: Path, architecture: str, described: dict[str, Any], message: str
) -> None:
    kind = {"NemotronHForCausalLM": "nemotron_h", "Qwen3NextForCausalLM": "qwen3_next"}[architecture]
    keys = {**SHAPE, **DIFFERENCES[kind], "architectures": [architecture], "quantization_config": described}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(UnsupportedModel, match=message):
        load_config(tmp_path, load_format="dummy")


def test_scales_of_a_stack_that_are_not_those_of_its_matrices_are_refused(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "granitemoehybrid")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.input_linear.weight_scale"
    tensors[name] = tensors[name][:3]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"scales are \[3, 256, 1\]: give those of 16 matrices"):
        load_model(load_config(folder))

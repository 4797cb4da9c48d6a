"""The text part of multimodal checkpoints is served like the text model alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from baton.engine.hf_config.errors import InvalidModelConfig, UnsupportedModel, WeightsError
from baton.engine.models import load_config, load_model

from ...helpers.checkpoints import edit_config, make_model
from ...helpers.paged import chunked_logprobs, random_tokens, reference_logprobs

TOLERANCE = 5e-4  # error of a logprob in float32

_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "patch_size": 8}
_QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
WHOLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3_text": (
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {**_TOWER, "num_hidden_layers": 1, "image_size": 16},
    ),
    "gemma4_text": (
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 8,
        },
    ),
    "qwen3": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", _QWEN_TOWER),
    "qwen3_5_text": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", _QWEN_TOWER),
    "qwen3_5_moe_text": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", _QWEN_TOWER),
    "ministral3": (
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {**_TOWER, "num_hidden_layers": 1, "image_size": 16, "head_dim": 8},
    ),
    "mistral": (
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {**_TOWER, "num_hidden_layers": 1, "image_size": 16, "head_dim": 8},
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return a function that makes a checkpoint of a whole model, and the text model of `transformers` in it."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            text = make_model(kind)
            config_name, name, tower = WHOLE[kind]
            vision = {"mm_tokens_per_image": 4} if kind == "gemma3_text" else {}
            keys = text.config.to_dict()
            if kind == "qwen3":
                keys["model_type"] = "qwen3_vl_text"
                keys["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [6, 5, 5]}
            config = getattr(transformers, config_name)(
                text_config=keys, vision_config=tower, tie_word_embeddings=False, **vision
            )
            model = getattr(transformers, name)(config)
            model.model.language_model.load_state_dict(text.model.state_dict())
            model.lm_head.load_state_dict(text.lm_head.state_dict())
            folder = tmp_path_factory.mktemp("whole") / kind
            model.save_pretrained(folder)
            made[kind] = folder, text
        return made[kind]

    return make


@pytest.mark.parametrize("kind", WHOLE)
def test_logprobs_equal_those_of_the_text_model_alone(kind: str, whole: Callable[[str], tuple[Path, Any]]) -> None:
    folder, text = whole(kind)
    config = load_config(folder, dtype="float32")
    assert config.is_text_part
    tokens = random_tokens(60)
    difference = chunked_logprobs(load_model(config), tokens, 37) - reference_logprobs(text, tokens)
    assert difference.abs().max().item() < TOLERANCE


@pytest.mark.parametrize("kind", ["gemma3_text", "mistral"])
def test_logprobs_equal_those_of_the_text_model_with_the_names_of_older_files(
    kind: str, whole: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, text = whole(kind)
    for file in folder.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    save_file({older_name(name): value for name, value in tensors.items()}, tmp_path / "model.safetensors")
    names = set(map(older_name, tensors))
    assert {"language_model.model.embed_tokens.weight", "language_model.lm_head.weight"} <= names
    model = load_model(load_config(tmp_path, dtype="float32"))
    tokens = random_tokens(60)
    assert (chunked_logprobs(model, tokens, 60) - reference_logprobs(text, tokens)).abs().max().item() < TOLERANCE


def test_keys_that_the_published_gemma_leaves_out_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    """The text_config of the 4B model has only these keys."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    written = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(written))
    ours = load_config(tmp_path, load_format="dummy")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    assert (ours.vocab_size, ours.num_heads, ours.num_kv_heads) == (
        theirs.vocab_size,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
    )
    assert (ours.head_dim, ours.max_model_len) == (theirs.head_dim, theirs.max_position_embeddings)
    assert ours.layer_windows[:6] == (1024, 1024, 1024, 1024, 1024, None)
    assert ours.tie_word_embeddings


def older_name(name: str) -> str:
    if name.startswith(("lm_head.", "language_model.")):
        return name if name.startswith("language_model.") else f"language_model.{name}"
    return name.replace("model.language_model.", "language_model.model.")


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"text_config": None}, InvalidModelConfig, "'text_config' must be an object"),
        ({"text_config": {"model_type": "gemma3n_text"}}, UnsupportedModel, "gemma3n_text.*only gemma3_text"),
    ],
)
def test_another_text_model_is_refused_by_name(
    changes: Mapping[str, Any],
    error: type[Exception],
    named: str,
    whole: Callable[[str], tuple[Path, Any]],
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_bytes((whole("gemma3_text")[0] / "config.json").read_bytes())
    edit_config(tmp_path, **changes)
    with pytest.raises(error, match=named):
        load_config(tmp_path, load_format="dummy")


def test_a_text_part_that_lacks_a_tensor_is_refused_by_its_name(
    whole: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, _ = whole("gemma3_text")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    gone = next(name for name in tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    save_file({name: value for name, value in tensors.items() if name != gone}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.layers\.0\.mlp\.down_proj\.weight"):
        load_model(load_config(tmp_path, dtype="float32"))
    assert json.loads((folder / "config.json").read_text())["vision_config"]

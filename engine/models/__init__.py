"""One file an architecture: its differences from the shared blocks of `engine.layers`.

Importing this package loads no torch: `MODELS` names the classes, `load_model` imports the one it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from baton.engine.parallel.groups import ALL_ALONE, ParallelGroups

if TYPE_CHECKING:
    import torch

    from baton.engine.hf_config.model_config import ModelConfig
    from baton.engine.layers.decoder import CausalLM
    from baton.engine.weights.progress import Progress

# `architectures` of config.json -> (module of this package, class)
MODELS: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("mistral", "MistralForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
    "DeepseekV2ForCausalLM": ("deepseek_v2", "DeepseekV2ForCausalLM"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "MixtralForCausalLM": ("mixtral", "MixtralForCausalLM"),
    "GptOssForCausalLM": ("gpt_oss", "GptOssForCausalLM"),
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class of a supported architecture (a key of `MODELS`)."""
    module, name = MODELS[architecture]
    cls: type[CausalLM] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return cls


def load_model(
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    groups: ParallelGroups = ALL_ALONE,
) -> CausalLM:
    """The model of `config` on `device`, its weights loaded as `config.load_format` says and laid out for the kernels.

    Of a group's rank, its share of the model. `progress` is called with (bytes done, bytes in all) after each tensor.
    Raises `WeightsError` where the checkpoint's tensors are not exactly the model's parameters; that is known before
    any weight is read.
    """
    from baton.engine.weights.loader import load_weights

    model = model_class(config.architecture)(config)
    model.divide(groups)
    load_weights(model, device=device, progress=progress)
    return model


def check_weights(config: ModelConfig) -> None:
    """Raises `WeightsError` where `load_model` would, before it reads a weight."""
    from baton.engine.weights.loader import check_weights

    check_weights(model_class(config.architecture)(config))


def stub_model(config: ModelConfig, *, device: torch.device | str, groups: ParallelGroups = ALL_ALONE) -> CausalLM:
    """Return a model that launches the same kernels as that of `config`: one layer of each kind, weights never filled.

    It takes the memory of a few layers, the embedding and the head. `groups`: one of `ParallelGroups.stubs()`.
    """
    from baton.engine.weights.loader import allocate_unfilled

    model = model_class(config.architecture)(config)
    model.shorten()
    model.divide(groups)
    allocate_unfilled(model, device=device)
    return model

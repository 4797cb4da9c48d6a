"""Building blocks of models. A model file defines which blocks a decoder layer has, and in which order they run.

    Embedding ─> LayerStep: attend(Attention) ─> feed_forward(GatedMLP | MoE) ─> ... ─> RMSNorm ─> Head
                     └── ResidualStream: the sum that every block reads through a norm and adds to

    weights      `method` (plain), `fp8`, `mxfp4`: their format in the checkpoint and in memory, and their products
    attention    `attention` with `head_projection` (keys and values), `mla` (latents), `rotary`
    states       `delta_net`, `kda`, `mamba2`
    MLPs         `mlp`, `moe` with `experts`
    a step       `step_context`: what all of them read of it; `token_mixer`: attention and states to a decoder layer
    the rest     `norm` with the residual stream, `embedding`, `decoder` with `decoder_layer`

Importing this package does not import torch: a block's module is imported when the block is first named. So model files
can be imported by processes that only read configs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.kernels.linear import Activation

    from .attention import Attention
    from .decoder import LayerInput
    from .decoder_layer import Branch, LayerStep
    from .delta_net import GatedDeltaNet
    from .experts import NormedRouter
    from .kda import KimiDeltaAttention
    from .mamba2 import Mamba2
    from .mla import LatentAttention
    from .mlp import MLP, FeedForward, GatedMLP
    from .moe import MoE
    from .norm import RMSNorm
    from .token_mixer import TokenMixer

__all__ = [
    "MLP",
    "Activation",
    "Attention",
    "Branch",
    "FeedForward",
    "GatedDeltaNet",
    "GatedMLP",
    "KimiDeltaAttention",
    "LatentAttention",
    "LayerInput",
    "LayerStep",
    "Mamba2",
    "MoE",
    "NormedRouter",
    "RMSNorm",
    "TokenMixer",
]

_MODULES = {
    "Activation": "mlp",
    "Attention": "attention",
    "Branch": "decoder_layer",
    "FeedForward": "mlp",
    "GatedDeltaNet": "delta_net",
    "GatedMLP": "mlp",
    "KimiDeltaAttention": "kda",
    "LatentAttention": "mla",
    "LayerInput": "decoder",
    "LayerStep": "decoder_layer",
    "MLP": "mlp",
    "Mamba2": "mamba2",
    "MoE": "moe",
    "NormedRouter": "experts",
    "RMSNorm": "norm",
    "TokenMixer": "token_mixer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

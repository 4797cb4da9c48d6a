"""A family of models: the contract between a model file and everything that reads configs or builds layers.

    config.json ──ConfigRules: defaults, windows, experts, latent──> ModelConfig ──Family.layer──> decoder layers
                                                                          └──ConfigRules.cache──> KVLayout, `baton plan`

Importing this package and its model files loads no torch: gateways and `baton plan` read configs, and never build one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.hf_config.model_config import ConfigRules, ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer


@dataclass(frozen=True, kw_only=True)
class Family(ConfigRules):
    """One architecture: how its config is read, what a token keeps in its caches, and its decoder layer."""

    layer: Callable[[ModelConfig, int], DecoderLayer]  # of a model, by index

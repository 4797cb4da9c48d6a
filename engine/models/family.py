"""A family of models: the contract between a model file and everything that reads configs or builds layers.

    config.json ──Family.defaults, windows, experts, latent, scales──> ModelConfig ──Family.layer──> decoder layers
                                                                            └────────Family.cache──> KVLayout, plans

Importing this package and its model files loads no torch: gateways and `baton plan` read configs, and never build one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.latent import LatentShape
from baton.engine.hf_config.windows import WindowRule

if TYPE_CHECKING:
    from baton.engine.hf_config.model_config import ModelConfig
    from baton.engine.layers.base import DecoderLayer


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The shape of what one token keeps in one layer's cache."""

    num_kv_heads: int
    num_planes: int  # 2: a key and a value; 1: a latent
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Factors and caps that a family reads from its config. By default there are none."""

    embedding: float = 1.0  # of the embedding's rows; rounded to the model's dtype, as they are
    score: float | None = None  # of attention's scores; None: head_dim ** -0.5
    score_cap: float | None = None  # scores become cap * tanh(score / cap)
    logit_cap: float | None = None  # and so do logits


def keys_and_values(config: ModelConfig) -> CacheShape:
    """Keep a key and a value of every KV head."""
    return CacheShape(num_kv_heads=config.num_kv_heads, num_planes=2, head_dim=config.head_dim)


def latents(config: ModelConfig) -> CacheShape:
    """Keep a latent and the rotated part of a key, which all heads share."""
    assert config.latent is not None, "a config of this family has latents"
    return CacheShape(num_kv_heads=1, num_planes=1, head_dim=config.latent.rank + config.latent.rope_dim)


def no_scales(keys: Keys) -> Scales:
    return Scales()


def no_tensors(config: ModelConfig) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture: how its config is read, what a token keeps in its caches, and its decoder layer."""

    architecture: str  # its name in `architectures` of config.json
    layer: Callable[[ModelConfig, int], DecoderLayer]  # of a model, by index
    cache: Callable[[ModelConfig], CacheShape]  # what a token keeps in each layer
    # Defaults of `transformers` for keys that a config.json leaves out, where families disagree or a null says no.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: WindowRule | None = None  # None: every layer sees all keys, whatever the config says
    experts: Callable[[Keys, int], ExpertsConfig] | None = None  # of so many layers; None: there are none
    latent: Callable[[Keys], LatentShape] | None = None  # None: keys and values are projected and kept as such
    scales: Callable[[Keys], Scales] = no_scales
    norm_offset: float = 0.0  # added to the weights of norms, which are stored without it
    activation: str = "silu"  # that its layers compute; a config that names another is refused
    activation_key: str = "hidden_act"  # under which a config names it
    ignored_tensors: Callable[[ModelConfig], tuple[str, ...]] = no_tensors  # patterns of tensors that go unread

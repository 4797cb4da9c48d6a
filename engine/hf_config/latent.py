"""The shape of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) as a config describes it."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidModelConfig, UnsupportedModel
from .keys import Keys


@dataclass(frozen=True)
class LatentShape:
    """Keys and values of all heads come from one vector a token: a latent, and a key part that carries the position."""

    rank: int  # numbers in a latent
    q_rank: int | None  # of the vector that queries come from; None: from the hidden state at once
    nope_dim: int  # of a head's query and key, without position
    rope_dim: int  # of a head's query, and of the key part that heads share: rotated
    value_dim: int

    @property
    def head_dim(self) -> int:
        """The width of a query, and of a key that is multiplied out of its latent."""
        return self.nope_dim + self.rope_dim


def read_latent(keys: Keys) -> LatentShape:
    """Read the shape of DeepSeek's latents. Raises `ModelError`."""
    straight = keys.values.get("q_lora_rank", 1536) is None  # null says something else here than a key left out
    shape = LatentShape(
        rank=keys.integer("kv_lora_rank", 512),
        q_rank=None if straight else keys.integer("q_lora_rank", 1536),
        nope_dim=keys.integer("qk_nope_head_dim", 128),
        rope_dim=keys.integer("qk_rope_head_dim", 64),
        value_dim=keys.integer("v_head_dim", 128),
    )
    if shape.rope_dim % 2:
        raise InvalidModelConfig(f"config.json: qk_rope_head_dim ({shape.rope_dim}) must be even for rotary embeddings")
    if shape.head_dim % 2:
        raise InvalidModelConfig(
            f"config.json: qk_nope_head_dim ({shape.nope_dim}) and qk_rope_head_dim ({shape.rope_dim}) must add up to "
            f"an even width of queries and keys, not {shape.head_dim}"
        )
    if shape.q_rank is None and keys.flag("attention_bias", False):
        raise UnsupportedModel("config.json: attention_bias without a q_lora_rank is not supported")
    return shape

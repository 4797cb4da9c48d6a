"""Token mixers: the part of a decoder layer in which a token reads those before it. Attention, or a recurrent state."""

from __future__ import annotations

import abc

from torch import Tensor

from baton.engine.core.layout import CachePlace
from baton.kernels.attention import AttentionBatch
from baton.kernels.linear import RowNorm

from .base import Layer
from .step_context import GroupCache, LayerContext


class TokenMixer(Layer, abc.ABC):
    """The part of a decoder layer that mixes the tokens of a sequence."""

    window: int | None = None  # number of keys that a query sees, its own included; None: all up to its own
    rotary_dim: int = 0  # the number of dimensions of a head that are rotated
    place: CachePlace  # the layer's cache: the cache group, and the layer's index in it

    @abc.abstractmethod
    def __call__(
        self,
        hidden: Tensor,
        context: LayerContext,
        wanted: Tensor | None = None,
        *,
        norm: RowNorm | None = None,
        add_to: Tensor | None = None,
    ) -> Tensor:
        """Return the output [T, hidden_size] for hidden [T, hidden_size], or [R, hidden_size] for the `wanted` tokens.

        `hidden` goes through `norm` first, if given. With `add_to`, the sum of `add_to` and the output is returned; the
        addition is in place unless the layer is divided over ranks. The keys, values or states of all T tokens are
        written to the layer's cache, whatever `wanted` is.
        """
        ...


class SelfAttention(TokenMixer):
    """A mixer with a cache entry for each token: keys and values, or a latent."""

    num_heads: int  # query heads on this rank
    num_kv_heads: int  # KV heads in this rank's cache

    @abc.abstractmethod
    def prepare(self, cache: GroupCache) -> AttentionBatch:
        """Return the batch with the kernels' plan for this step. All layers of the cache group share it."""
        ...

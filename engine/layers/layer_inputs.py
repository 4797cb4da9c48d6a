"""Per-layer embeddings: every layer has a small input of its own for each token (Gemma 3n and Gemma 4).

token id ── embedding ──────────────────────┐
hidden state ── projection ── norm of each ─┴─ mean x sqrt(2) ──> inputs [T, layers x width], once a step

x = x + norm(projection(gelu(gate(x)) * input of the layer))                                  in every layer
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from baton.engine.hf_config.model_config import LayerInputShape, ModelConfig
from baton.kernels.linear import RowNorm

from .base import Layer, TokenRows
from .embedding import Embedding
from .linear import Linear
from .mlp import FeedForward
from .norm import RMSNorm


class LayerInputs(Layer):
    """Token ids [T] and the embeddings that the stream begins with [T, hidden] -> inputs of all layers [T, L * width].

    Each layer's width is normed by itself.
    """

    def __init__(self, config: ModelConfig, shape: LayerInputShape) -> None:
        width = config.num_layers * shape.width
        self.embed_tokens_per_layer = Embedding(shape.vocab_size, width, scale=shape.width**0.5)
        self.per_layer_model_projection = Linear(config.hidden_size, width)
        self.per_layer_projection_norm = RMSNorm(shape.width, config.rms_norm_eps)
        self._width = shape.width
        self._factor = config.hidden_size**-0.5

    def __call__(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        projected = self.per_layer_model_projection(hidden) * self._factor
        normed = self.per_layer_projection_norm(projected.unflatten(1, (-1, self._width))).flatten(1)
        return (normed + self.embed_tokens_per_layer(token_ids)) * 2**-0.5


class LayerInput(FeedForward):
    """projection(gelu(gate(x)) * the layer's input); `layer` is its index in the model."""

    def __init__(self, hidden_size: int, width: int, layer: int) -> None:
        self.per_layer_input_gate = Linear(hidden_size, width)
        self.per_layer_projection = Linear(width, hidden_size)
        self._columns = slice(layer * width, (layer + 1) * width)

    def __call__(
        self, hidden: Tensor, rows: TokenRows, *, norm: RowNorm | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        assert rows.layer_inputs is not None, "the decoder makes the inputs of all layers before the first"
        gate = functional.gelu(self.per_layer_input_gate(hidden, norm=norm), approximate="tanh")
        return self.per_layer_projection(gate * rows.layer_inputs[:, self._columns], add_to=add_to)

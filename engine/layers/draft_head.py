"""A draft (multi-token prediction) layer, which predicts the token after the next one (arXiv:2412.19437, section 2.2).

    hidden state of token i, after the last norm ───norm──┐
                                                          ├──projection──> layer ──norm──> the model's head: token i + 2
    embedding of token i + 1 ─────────────────────norm────┘

Its keys and values are cached like those of the model's own layers, at the position of token i. For further drafts, a
model with one draft layer runs it again, with its own output in place of the model's hidden state and its draft as the
next token. A model with several draft layers runs each of them once, all with the same hidden state (before the last
norm) and the tokens i + 2, i + 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.hf_config.model_config import DraftRules, ModelConfig

from .base import Layer
from .decoder_layer import DecoderLayer, LayerStep
from .linear import Linear
from .norm import ResidualStream, RMSNorm
from .step_context import LayerContext


class DraftStates(NamedTuple):
    """The results of a draft head for R tokens, each [R, hidden_size]."""

    normed: Tensor  # the input of the model's head
    hidden: Tensor  # replaces the model's hidden states when the next token is drafted


class DraftHead(Layer):
    """Norms, projection and decoder layer. Embedding and head are the model's."""

    def __init__(self, config: ModelConfig, rules: DraftRules, layer: DecoderLayer) -> None:
        size, eps, offset = config.hidden_size, config.rms_norm_eps, config.rules.norm_offset
        self.embedding_norm = RMSNorm(size, eps, offset=offset)
        self.hidden_norm = RMSNorm(size, eps, offset=offset)
        self.projection = Linear(2 * size, size)
        self.layer = layer
        self.norm = RMSNorm(size, eps, offset=offset)
        self._rules = rules

    def children(self) -> Iterator[tuple[str, Layer]]:
        for name, child in super().children():
            yield getattr(self._rules, name), child

    def __call__(
        self, embedded: Tensor, hidden: Tensor, context: LayerContext, wanted: Tensor | None = None
    ) -> DraftStates:
        """Return the draft states for `hidden` [T, hidden_size], or only for the `wanted` [R] int64 tokens.

        `embedded` [T, hidden_size] has the embeddings of the tokens that follow. Writes keys and values of all T
        tokens. `context.rows_of_ranks` counts the returned rows of each data-parallel rank.
        """
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=1)
        stream = ResidualStream(self.projection(both), in_place=not hidden.is_cpu)
        self.layer(LayerStep(stream, replace(context, layer_inputs=None), wanted))
        total, _ = stream.read(None)
        normed = self.norm(total)
        return DraftStates(normed, normed if self._rules.goes_on_normed else total)

"""A decoder layer behind the last one, which guesses the token behind the next one (arXiv:2412.19437, section 2.2).

    hidden state of token i, behind the last norm ──norm──┐
                                                          ├──projection──> layer ──norm──> the model's head: token i + 2
    embedding of token i + 1 ─────────────────────norm────┘

Its keys and values lie with those of the model's own layers, as of token i. Further tokens are guessed with what it
gives in the place of the model's hidden state, and its guess as the next token. Or further layers guess them, one each,
from the same hidden state (before the last norm) and the tokens i + 2, i + 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.hf_config.model_config import DraftRules, ModelConfig

from .attention import LayerContext
from .base import Layer
from .decoder_layer import DecoderLayer, LayerStep
from .linear import Linear
from .norm import ResidualStream, RMSNorm


class DraftStates(NamedTuple):
    """The results of a draft head for R tokens, each [R, hidden_size]."""

    normed: Tensor  # for the model's head
    hidden: Tensor  # for the next guess, in the place of the model's hidden states


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
        """Give the states of hidden [T, hidden_size], or of the `wanted` [R] int64 tokens of it.

        `embedded` [T, hidden_size] is of the tokens behind them. Writes keys and values of all T tokens. The context's
        `rows_of_ranks` are of the states that are given.
        """
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=1)
        stream = ResidualStream(self.projection(both), in_place=not hidden.is_cpu)
        self.layer(LayerStep(stream, replace(context, layer_inputs=None), wanted))
        total, _ = stream.read(None)
        normed = self.norm(total)
        return DraftStates(normed, normed if self._rules.goes_on_normed else total)

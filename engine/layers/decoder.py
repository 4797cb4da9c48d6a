"""A decoder-only language model: embedding, the decoder layers of a family (`engine.models`), last norm, head.

Models with per-layer embeddings (Gemma 3n and Gemma 4) give every layer a small extra input for each token:

    token id ── embedding ──────────────────────┐
    hidden state ── projection ── norm of each ─┴─ mean x sqrt(2) ──> inputs [T, layers x width], once a step

    x = x + norm(projection(gelu(gate(x)) * input of the layer))                                  in every layer
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.hf_config.model_config import LayerInputShape, ModelConfig
from baton.kernels import elementwise
from baton.kernels.activation import soft_cap
from baton.kernels.linear import RowNorm

from .base import Layer
from .decoder_layer import DecoderLayer, LayerStep
from .draft_head import DraftHead, DraftStates
from .embedding import Embedding, Head, TiedHead
from .linear import Linear
from .mlp import FeedForward
from .norm import ResidualStream, RMSNorm
from .rotary import cos_sin_table, query_factors
from .step_context import GroupCache, LayerContext, RankRows, StateCache, TokenRows
from .token_mixer import SelfAttention, TokenMixer


class Decoder(Layer):
    """Embedding, layers, last norm: token ids [T] -> hidden states [T, hidden], or [R, hidden] of `wanted` tokens."""

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer]) -> None:
        scales = config.scales
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, scale=scales.embedding, rounds_scale=scales.rounds_embedding
        )
        self.layers = layers
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=config.rules.norm_offset)
        self.layer_inputs = None if config.layer_inputs is None else LayerInputs(config, config.layer_inputs)
        self._names = config.rules.names
        self._drafted_from = config.drafted_from
        self._reads_total = config.num_layers in config.drafted_from  # the draft head reads the last norm's input, too

    def children(self) -> Iterator[tuple[str, Layer]]:
        for name, child in super().children():
            if child is self.layer_inputs:
                yield from child.children()  # it is no level of its own in checkpoints' names
            else:
                yield self._names.get(name, name), child

    def __call__(
        self,
        token_ids: Tensor,
        context: LayerContext,
        wanted: Tensor | None = None,
        ranks: RankRows | None = None,
        inputs: list[Tensor] | None = None,
    ) -> Tensor:
        """Return hidden states after the last norm. Append the inputs of layers `config.drafted_from` to `inputs`."""
        hidden = self.embed_tokens(token_ids)
        if self.layer_inputs is not None:
            context = replace(context, layer_inputs=self.layer_inputs(token_ids, hidden))
        last = context
        if ranks is not None:
            context = replace(context, rows_of_ranks=ranks.tokens)
            last = replace(context, rows_of_ranks=ranks.wanted)
        stream = ResidualStream(hidden, in_place=not hidden.is_cpu)
        step = LayerStep(stream, context)
        for index, layer in enumerate(self.layers[:-1]):
            if inputs is not None and index in self._drafted_from:
                inputs.append(stream.total)
            layer(step)
        if inputs is not None:
            # The last layer's input, if the draft head reads it; a shortened model repeats it for the layers left out.
            inputs += [stream.total] * (len(self._drafted_from) - len(inputs) - self._reads_total)
        # Most prompt tokens only need their KV written: after its attention, the last layer drops all but `wanted`.
        self.layers[-1](LayerStep(stream, last, wanted))
        if inputs is not None and self._reads_total:
            inputs.append(stream.total)
        return stream.normed(self.norm)


class CausalLM(Layer):
    """The whole model, as the runner sees it. Checkpoints name its parts `model` and `lm_head`, or as `names` says."""

    def __init__(
        self, config: ModelConfig, layers: list[DecoderLayer], draft_layers: Sequence[DecoderLayer] = ()
    ) -> None:
        self.config = config
        self.model = Decoder(config, layers)
        self.draft_heads: list[DraftHead] = []
        for layer in draft_layers:
            assert config.rules.draft is not None, "a config whose draft layers are run says where they lie"
            self.draft_heads.append(DraftHead(config, config.rules.draft, layer))
        # In a tuple, so that `Layer.children` does not find them a second time.
        self._attention = _one_of_each_group([*layers, *draft_layers])
        self.lm_head: Head | TiedHead
        if config.tie_word_embeddings:
            self.lm_head = TiedHead(self.model.embed_tokens)
        else:
            self.lm_head = Head(config.hidden_size, config.vocab_size)
        self._cos_sin: tuple[Tensor, ...] | None = None
        self._query_factors: Tensor | None = None  # of each position: see `QueryGrowth`; None: all are 1

    def children(self) -> Iterator[tuple[str, Layer]]:
        rules = self.config.rules
        paths = self._draft_paths()
        for name, child in super().children():
            if isinstance(child, DraftHead):
                yield next(paths), child
            else:
                yield rules.names.get(name, name), child

    def _draft_paths(self) -> Iterator[str]:
        """Yield the path of each draft layer in the checkpoint."""
        rules = self.config.rules.draft
        return iter(() if rules is None else [rules.path(self.config, i) for i in range(len(self.draft_heads))])

    @property
    def num_draft_layers(self) -> int:
        return len(self.draft_heads)

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.data.device

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Patterns of checkpoint tensors that are not loaded.

        Rope frequencies and a second copy of a tied embedding are redundant; scales of keys and values are only needed
        with an FP8 KV cache.
        """
        tied = ("lm_head.weight",) if self.config.tie_word_embeddings else ()
        rules = self.config.rules
        names = () if rules.draft is None else rules.draft.copies
        copies = tuple(f"{path}.{name}" for path in self._draft_paths() for name in names)
        by_family = rules.ignored_tensors(self.config)
        return ("*.rotary_emb.inv_freq", "*.?_scale", *tied, *copies, *by_family)

    def allocate(self, device: torch.device | str, dtype: torch.dtype) -> None:
        super().allocate(device, dtype)
        growth, length = self.config.query_growth, self.config.max_model_len
        self._cos_sin = tuple(cos_sin_table(each, length, device) for each in self.config.rotations)
        if growth is not None and length > growth.every:
            self._query_factors = query_factors(growth, length).to(device, dtype)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Within this context, run only one layer of each kind, and the last: every kernel of a step runs once."""
        layers = self.model.layers
        self.model.layers = [*self._one_of_each_kind(), layers[-1]]
        try:
            yield
        finally:
            self.model.layers = layers

    def shorten(self) -> None:
        """Drop the layers that `shortened` leaves out, for good."""
        self.model.layers = list(dict.fromkeys([*self._one_of_each_kind(), self.model.layers[-1]]))

    def _one_of_each_kind(self) -> list[DecoderLayer]:
        return list({_kernels_of(layer): layer for layer in reversed(self.model.layers)}.values())

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[GroupCache | StateCache],
        wanted: Tensor | None = None,
        ranks: RankRows | None = None,
    ) -> Tensor:
        """Return hidden states [T, hidden] for token_ids [T] (an integer type), the step's sequences concatenated.

        The layers write keys, values and states of these tokens into `caches`, one for each cache group of the config.
        With `wanted` [R] int64, indices of tokens, only their states [R, hidden] are returned, and the last layer skips
        most of its work for the others. In lockstep, `ranks` has the number of tokens of each data-parallel rank;
        without it, all have as many as this rank.
        """
        return self.model(token_ids, self._context(caches), wanted, ranks)

    __call__ = forward

    @torch.inference_mode()
    def forward_all(
        self, token_ids: Tensor, caches: Sequence[GroupCache | StateCache], ranks: RankRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states of all tokens, as `forward` does, and the input of the draft head [T, ...].

        That input is the same hidden states, or the concatenated inputs of the layers `config.drafted_from`.
        """
        if ranks is not None:
            ranks = replace(ranks, wanted=ranks.tokens)  # every rank computes all of its tokens to the end
        if not self.config.drafted_from:
            hidden = self.forward(token_ids, caches, None, ranks)
            return hidden, hidden
        inputs: list[Tensor] = []
        hidden = self.model(token_ids, self._context(caches), None, ranks, inputs)
        return hidden, torch.cat(inputs, dim=1)

    def _context(self, caches: Sequence[GroupCache | StateCache]) -> LayerContext:
        """Return the inputs of all layers, with the attention kernels' plan of this step for each cache group."""
        assert self._cos_sin is not None, "allocate() comes before the first step"
        prepared = tuple(
            replace(cache, batch=self._attention[group].prepare(cache)) if isinstance(cache, GroupCache) else cache
            for group, cache in enumerate(caches)
        )
        factors = self._query_factors
        if factors is not None:
            batch = next(cache.batch for cache in prepared if isinstance(cache, GroupCache))
            factors = factors[batch.positions][:, None, None]
        return LayerContext(prepared, self._cos_sin, factors)

    @torch.inference_mode()
    def draft(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        caches: Sequence[GroupCache | StateCache],
        wanted: Tensor | None = None,
        ranks: RankRows | None = None,
        number: int = 0,
    ) -> DraftStates:
        """Run draft layer `number` on `hidden` [T, hidden], the states of all tokens of a step, and on `token_ids` [T].

        `token_ids[i]` is the token `number` + 1 positions after the one that `hidden[i]` belongs to. Returns the states
        of the `wanted` [R] int64 tokens, or of all; `logits` of the normed ones predict the token after `token_ids[i]`.
        Writes the keys and values of all T tokens into `caches`. In lockstep, `ranks.seqs` has R of each data-parallel
        rank; None: the same on all.
        """
        context = replace(self._context(caches), rows_of_ranks=None if ranks is None else ranks.seqs)
        return self.draft_heads[number](self.model.embed_tokens(token_ids), hidden, context, wanted)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [R, vocab] of hidden states [R, hidden], scaled and capped.

        They are float32 on a CPU, else of the model's dtype, and written to `out` (of the model's dtype) if given.
        """
        scales, logits = self.config.scales, self.lm_head.logits(hidden, out=out)
        if logits.is_cpu:
            logits = logits.float()
        if scales.logit != 1.0:
            logits.mul_(scales.logit)
        return logits if scales.logit_cap is None else soft_cap(logits, scales.logit_cap)


def _one_of_each_group(layers: Sequence[DecoderLayer]) -> tuple[SelfAttention, ...]:
    """Return the attention of each cache group's first layer, in the order of groups. Groups of states come last."""
    first: dict[int, SelfAttention] = {}
    for layer in layers:
        for _, child in layer.children():
            if isinstance(child, SelfAttention):
                first.setdefault(child.place.group, child)
    return tuple(first[group] for group in sorted(first))


def _kernels_of(layer: Layer) -> tuple[object, ...]:
    """Return a key that is equal for layers that run the same kernels over the same shapes."""
    mixed = (layer.window, layer.rotary_dim) if isinstance(layer, TokenMixer) else None
    shapes = tuple(parameter.shape for _, parameter in layer.parameters())
    return type(layer), mixed, shapes, tuple(_kernels_of(child) for _, child in layer.children())


class LayerInputs(Layer):
    """Per-layer embeddings: token ids [T] and their embeddings [T, hidden] -> inputs of all L layers [T, L * width].

    The input of each layer is normed by itself.
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
    """projection(gelu(gate(x)) * per-layer input of layer `layer`)."""

    def __init__(self, hidden_size: int, width: int, layer: int) -> None:
        self.per_layer_input_gate = Linear(hidden_size, width)
        self.per_layer_projection = Linear(width, hidden_size)
        self._columns = slice(layer * width, (layer + 1) * width)

    def __call__(
        self, hidden: Tensor, rows: TokenRows, *, norm: RowNorm | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        assert rows.layer_inputs is not None, "the decoder makes the inputs of all layers before the first"
        gate = elementwise.gelu_tanh(self.per_layer_input_gate(hidden, norm=norm))
        return self.per_layer_projection(gate * rows.layer_inputs[:, self._columns], add_to=add_to)

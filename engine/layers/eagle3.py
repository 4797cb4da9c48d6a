"""An EAGLE-3 head (arXiv:2503.01840), which drafts tokens from hidden states of several of the model's layers.

    inputs of three layers for token i ──fc──> h ──norm──┐
                                                         ├──> attention + h ──> MLP ──norm──> head: token i + 2
    embedding of token i + 1, the model's ────────norm───┘

For further drafts, the head's own state before the last norm takes the place of h. The head's vocabulary is smaller
than the model's: its token i is the model's token `i + d2t[i]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from baton.engine.hf_config.model_config import Eagle3Shape, ModelConfig

from .attention import Attention
from .base import Layer, Parameter, Slot, join
from .draft_head import DraftStates
from .embedding import Embedding, Head
from .linear import Linear
from .mlp import GatedMLP
from .norm import RMSNorm
from .rotary import cos_sin_table
from .step_context import GroupCache, LayerContext, RankRows, StateCache, TokenRows, rows_at


class Eagle3Layer(Layer):
    """Attention of two hidden states side by side, and an MLP."""

    def __init__(self, config: ModelConfig, shape: Eagle3Shape) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config, 0, in_features=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size, bias=config.mlp_bias)
        self._adds_to_normed = shape.goes_on_normed

    def __call__(self, embedded: Tensor, hidden: Tensor, context: LayerContext, wanted: Tensor | None) -> Tensor:
        """Return states [R, hidden_size] of the `wanted` tokens [R], or [T, hidden_size] of all.

        `embedded` and `hidden` are [T, hidden_size].
        """
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.input_layernorm(embedded), normed), dim=1)
        total = normed if self._adds_to_normed else hidden
        slots = context.slots
        if wanted is not None:
            total, slots = rows_at(total, wanted), rows_at(slots, wanted)
        total = total + self.self_attn(both, context, wanted)
        return total + self.mlp(self.post_attention_layernorm(total), TokenRows(slots))


class Eagle3Head(Layer):
    """The whole head, as the runner sees it: `draft` and `logits` are those of `CausalLM`."""

    num_draft_layers = 1

    def __init__(self, config: ModelConfig, embedding: Embedding) -> None:
        """`embedding` is the model's."""
        assert config.eagle3 is not None, "a config that `read_eagle3` has read"
        self.config, shape = config, config.eagle3
        self.fc = Linear(len(shape.layers) * config.hidden_size, config.hidden_size)
        self.midlayer = Eagle3Layer(config, shape)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Head(config.hidden_size, shape.vocab_size)
        self.d2t = Parameter(shape.vocab_size, dtype=torch.int64) if shape.vocab_size < config.vocab_size else None
        self._embedding = (embedding,)  # in a tuple, so that `Layer.children` does not find it
        self._token_ids: Tensor | None = None  # the model's token id for each of the head's
        self._cos_sin: tuple[Tensor, ...] | None = None

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Patterns of tensors that are not loaded: `t2d`, the inverse of `d2t`, and a copy of the model's embedding."""
        unmapped = ("d2t",) if self.d2t is None else ()
        return ("t2d", "embed_tokens.weight", "*.rotary_emb.inv_freq", *unmapped)

    def slots(self, path: str = "") -> Iterator[Slot]:
        for slot in super().slots(path):
            if slot.parameter is self.d2t:
                slot = _WholeNumbers(join(path, "d2t"), self.d2t)
            yield slot

    def allocate(self, device: torch.device | str, dtype: torch.dtype) -> None:
        super().allocate(device, dtype)
        config = self.config
        self._cos_sin = tuple(cos_sin_table(each, config.max_model_len, device) for each in config.rotations)
        if self.d2t is not None:
            self.d2t.data.zero_()  # valid token ids even if no checkpoint fills it

    def finish(self) -> None:
        super().finish()
        if self.d2t is not None:
            numbers = self.d2t.data
            self._token_ids = torch.arange(len(numbers), device=numbers.device) + numbers

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
        """Return draft states, as `CausalLM.draft` does.

        `hidden` [T, ...] is the concatenated inputs of several of the model's layers, or the head's own states from the
        previous draft step. `ranks` is ignored: each data-parallel rank has a whole head.
        """
        assert self._cos_sin is not None, "allocate() comes before the first step"
        (cache,) = caches
        assert isinstance(cache, GroupCache), "attention keeps keys and values"
        prepared = GroupCache(self.midlayer.self_attn.prepare(cache), cache.kv)
        if hidden.shape[1] != self.config.hidden_size:
            hidden = self.fc(hidden)
        embedded = self._embedding[0](token_ids)
        total = self.midlayer(embedded, hidden, LayerContext((prepared,), self._cos_sin), wanted)
        return DraftStates(self.norm(total), total)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [R, vocab] of hidden states [R, hidden]: -inf for tokens outside the head's vocabulary."""
        assert out is None, "logits of guesses are not kept"
        logits = self.lm_head.logits(hidden)
        if logits.is_cpu:
            logits = logits.float()
        if self._token_ids is None:
            return logits
        every = logits.new_full((len(logits), self.config.vocab_size), float("-inf"))
        every[:, self._token_ids] = logits
        return every


class _WholeNumbers(Slot):
    __slots__ = ()

    stored_as = ("I64", "I32")

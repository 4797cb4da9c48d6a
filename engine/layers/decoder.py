"""A decoder-only language model with pre-norm residual layers: what Llama, Mistral, Qwen2 and Qwen3 share.

An architecture is a subclass of `CausalLM` that names its attention (and, where it differs, its feed-forward layer).
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.model_config import ModelConfig
from baton.kernels.attention import AttentionBatch

from .attention import Attention, LayerContext
from .base import Layer
from .embedding import Embedding, TiedHead
from .linear import Linear
from .mlp import GatedMLP
from .norm import RMSNorm
from .rotary import cos_sin_table


class DecoderLayer(Layer):
    """x + attention(norm(x)), then x + mlp(norm(x)). The sum travels beside the last output until the next norm."""

    def __init__(self, config: ModelConfig, attention: Attention, mlp: GatedMLP) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def __call__(
        self, out: Tensor, residual: Tensor | None, context: LayerContext, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(last output, sum before it), [T, hidden] each; behind the attention only the `wanted` tokens [R] go on."""
        if residual is None:
            normed, residual = self.input_layernorm(out), out
        else:
            normed, residual = self.input_layernorm.after_add(out, residual)
        attended = self.self_attn(normed, context, wanted)
        if wanted is not None:
            residual = residual[wanted]
        normed, residual = self.post_attention_layernorm.after_add(attended, residual)
        return self.mlp(normed), residual


class Decoder(Layer):
    """Embedding, layers, last norm: token ids [T] -> hidden states [T, hidden], or those of the `wanted` tokens [R]."""

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer]) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = layers
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, token_ids: Tensor, context: LayerContext, wanted: Tensor | None = None) -> Tensor:
        out, residual = self.embed_tokens(token_ids), None
        for layer in self.layers[:-1]:
            out, residual = layer(out, residual, context)
        # Of most prompt tokens only the KV is used: the last layer ends for them where that is written.
        out, residual = self.layers[-1](out, residual, context, wanted)
        return self.norm.after_add(out, residual)[0]


class CausalLM(Layer):
    """The whole model, as the runner sees it. Checkpoints give the names `model` and `lm_head`."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        layers = [
            DecoderLayer(config, self.make_attention(config, layer), self.make_mlp(config))
            for layer in range(config.num_layers)
        ]
        self.model = Decoder(config, layers)
        self.lm_head: Linear | TiedHead
        if config.tie_word_embeddings:
            self.lm_head = TiedHead(self.model.embed_tokens)
        else:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self._cos_sin: Tensor | None = None

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Patterns of checkpoint tensors that say nothing new: rope frequencies, a second copy of a tied embedding."""
        return ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if self.config.tie_word_embeddings else ()))

    @classmethod
    def make_attention(cls, config: ModelConfig, layer: int) -> Attention:
        return Attention(config, layer)

    @classmethod
    def make_mlp(cls, config: ModelConfig) -> GatedMLP:
        return GatedMLP(config.hidden_size, config.intermediate_size)

    def allocate(self, device: torch.device | str, dtype: torch.dtype) -> None:
        super().allocate(device, dtype)
        self._cos_sin = cos_sin_table(self.config.rope, self.config.head_dim, self.config.max_model_len, device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Hidden states [T, hidden] of token_ids [T] (an integer type), all sequences of the step one after another.

        Writes the KV of these tokens into kv [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]. With
        `wanted` [R] int64, indices of tokens, gives [R, hidden] and saves the last layer's work on all others.
        """
        assert self._cos_sin is not None, "allocate() comes before the first step"
        return self.model(token_ids, LayerContext(batch, kv, self._cos_sin), wanted)

    __call__ = forward

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab] float32 of hidden states [R, hidden]."""
        return self.lm_head(hidden).float()

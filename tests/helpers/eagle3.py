"""Tiny EAGLE-3 heads of random weights, as they are published, and what they guess by plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZE, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 64, 4, 1, 24, 80
VOCAB, DRAFT_VOCAB = 256, 96
EPS, THETA = 1e-5, 500.0


def write_eagle3(folder: Path, *, seed: int = 4, **changes: Any) -> Path:
    """Write a head for a model of the tests' shape, which knows every second token or so; return `folder`."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": SIZE,
        "intermediate_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 2048,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return 0.1 * torch.randn(shape, generator=generator) + (len(shape) == 1)

    size, width, head_dim = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    q, kv = (config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    known = torch.randperm(config["vocab_size"], generator=generator)[: config["draft_vocab_size"]].sort().values
    tensors = {
        "d2t": known - torch.arange(len(known)),
        "t2d": torch.isin(torch.arange(config["vocab_size"]), known),
        "fc.weight": random(size, 3 * size),
        "midlayer.input_layernorm.weight": random(size),
        "midlayer.hidden_norm.weight": random(size),
        "midlayer.post_attention_layernorm.weight": random(size),
        "midlayer.self_attn.q_proj.weight": random(q, 2 * size),
        "midlayer.self_attn.k_proj.weight": random(kv, 2 * size),
        "midlayer.self_attn.v_proj.weight": random(kv, 2 * size),
        "midlayer.self_attn.o_proj.weight": random(size, q),
        "midlayer.mlp.gate_proj.weight": random(width, size),
        "midlayer.mlp.up_proj.weight": random(width, size),
        "midlayer.mlp.down_proj.weight": random(size, width),
        "norm.weight": random(size),
        "lm_head.weight": random(len(known), size),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Eagle3Reference:
    """A head of `write_eagle3` beside a `transformers` model, in float32."""

    def __init__(self, folder: Path, model: Any) -> None:
        self._tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        self._layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        self._adds_to_normed = config.get("norm_before_residual", False)
        self._model = model.eval()

    @torch.inference_mode()
    def states_of_model(self, token_ids: list[int]) -> Tensor:
        """Return what the head reads of a text, [T, hidden_size]."""
        out = self._model.model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)
        return torch.cat([out.hidden_states[layer][0] for layer in self._layers], dim=1) @ self._tensors["fc.weight"].T

    def inputs(self, following: list[int], hidden: Tensor) -> Tensor:
        """Return what goes into the layer: the tokens behind those of `hidden`, and `hidden`."""
        embedded = self._model.model.embed_tokens.weight[torch.tensor(following)]
        return torch.cat((embedded, hidden), dim=1)

    @torch.inference_mode()
    def last(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [V] behind the last of the layer's inputs [T, ...], and its hidden state [1, H]."""
        embedded, hidden = inputs.split(SIZE, dim=1)
        normed = self._norm("midlayer.hidden_norm", hidden)
        both = torch.cat((self._norm("midlayer.input_layernorm", embedded), normed), dim=1)
        q, k, v = (self._heads(name, both) for name in "qkv")
        q, k = self._rotated(q), self._rotated(k)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k.expand(HEADS, -1, -1), v.expand(HEADS, -1, -1), is_causal=True
        )
        attended = out.transpose(0, 1).flatten(1) @ self._tensors["midlayer.self_attn.o_proj.weight"].T
        total = ((normed if self._adds_to_normed else hidden) + attended)[-1:]
        x = self._norm("midlayer.post_attention_layernorm", total)
        gate, up, down = (self._tensors[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        total = total + (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        logits = torch.full((VOCAB,), float("-inf"))
        known = torch.arange(DRAFT_VOCAB) + self._tensors["d2t"]
        logits[known] = (self._norm("norm", total) @ self._tensors["lm_head.weight"].T)[0]
        return logits, total

    def _heads(self, name: str, x: Tensor) -> Tensor:
        return (
            (x @ self._tensors[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(1, (-1, HEAD_DIM)).transpose(0, 1)
        )

    def _rotated(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]), THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        cos, sin = (each.repeat(1, 2) for each in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self._tensors[f"{name}.weight"]

"""A tiny MiMo-V2-Flash with its three draft layers, and a plain torch reference for their drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from baton.engine.core.sampling import SamplingParams
from baton.kernels.sampling import encode_row, sample_rows

from .checkpoints import DIFFERENCES, SHAPE, make_model, write_checkpoint

NUM_LAYERS = 3
EPS = SHAPE["rms_norm_eps"]
_OWN = DIFFERENCES["mimo_v2_flash"]
KEY_DIM, VALUE_DIM, WINDOW, SCALE = (
    _OWN[name] for name in ("head_dim", "v_head_dim", "sliding_window", "attention_value_scale")
)
_ROPE = _OWN["rope_parameters"]["sliding_attention"]
ROTARY_DIM = int(KEY_DIM * _ROPE["partial_rotary_factor"])


def write_mimo(folder: Path, *, dtype: str = "float32", **config: Any) -> Path:
    """Write a checkpoint whose draft layers lie in a file of their own, as published; return `folder`.

    `config` overrides keys of the smallest config; `MimoReference` supports that smallest one only.
    """
    write_checkpoint(folder, "mimo_v2_flash", dtype=dtype, **config)
    generator = torch.Generator().manual_seed(21)
    shape = {**SHAPE, **DIFFERENCES["mimo_v2_flash"], **config}
    size, width, heads = (shape[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    kv_heads, key_dim, value_dim = 2 * shape["num_key_value_heads"], shape["head_dim"], shape["v_head_dim"]

    def random(*shape: int) -> Tensor:
        return (0.1 * torch.randn(shape, generator=generator) + (len(shape) == 1)).to(getattr(torch, dtype))

    tensors = {}
    for number in range(NUM_LAYERS):
        layer = {
            **{f"{name}.weight": random(size) for name in ("enorm", "hnorm", "final_layernorm")},
            **{f"{name}.weight": random(size) for name in ("input_layernorm", "pre_mlp_layernorm")},
            "eh_proj.weight": random(size, 2 * size),
            "self_attn.q_proj.weight": random(heads * key_dim, size),
            "self_attn.k_proj.weight": random(kv_heads * key_dim, size),
            "self_attn.v_proj.weight": random(kv_heads * value_dim, size),
            "self_attn.o_proj.weight": random(size, heads * value_dim),
            "self_attn.attention_sink_bias": random(heads),
            "mlp.gate_proj.weight": random(width, size),
            "mlp.up_proj.weight": random(width, size),
            "mlp.down_proj.weight": random(size, width),
        }
        tensors |= {f"model.mtp.layers.{number}.{name}": tensor for name, tensor in layer.items()}
    save_file(tensors, folder / "model_mtp.safetensors", metadata={"format": "pt"})
    own = load_file(folder / "model.safetensors")
    norm = own["model.norm.weight"]  # norms of ones would hide whether hidden states are read before or after the norm
    own["model.norm.weight"] = norm * (0.5 + torch.rand(len(norm), generator=generator)).to(norm.dtype)
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    files = dict.fromkeys(own, "model.safetensors") | dict.fromkeys(tensors, "model_mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


class MimoReference:
    """A reference in float32: the draft layers of a `write_mimo` checkpoint beside a `transformers` model."""

    def __init__(self, folder: Path) -> None:
        self._tensors = load_file(folder / "model_mtp.safetensors")
        self._model = make_model("mimo_v2_flash").eval()  # the written model, except for a norm
        self._model.model.norm.weight.data = load_file(folder / "model.safetensors")["model.norm.weight"]

    @torch.inference_mode()
    def accepted(self, whole: list[int], num_prompt: int, params: SamplingParams, most: int) -> list[int]:
        """Return how many drafts of a request by itself are right, by their position in a step.

        `whole` is its prompt, which is read in one step, followed by its answer; a step has up to `most` drafts.
        """
        accepted = [0] * most
        table = torch.from_numpy(encode_row(params, seed=params.seed or 0, prompt_len=num_prompt))[None]
        hidden = self._states_of_model(whole)
        read = torch.zeros(most, len(whole), dtype=torch.int64)  # by layer, the token paired with each hidden state
        start, known = 0, num_prompt  # a step ran the tokens from `start` on, and drew the one at index `known`
        while known + 1 < len(whole):
            guesses: list[int] = []
            for layer in range(most):
                behind = [*whole[: known + 1], *guesses]
                read[layer, start:known] = torch.tensor(behind[start + 1 + layer : known + 1 + layer])
                logits = self._logits(layer, read[layer, :known], hidden[:known])
                position = torch.tensor([known + 1 + layer])
                guesses.append(int(sample_rows(logits[None], table, torch.tensor([0]), position)))
            right = 0
            for guess, token in zip(guesses, whole[known + 1 : len(whole) - 1], strict=False):
                if guess != token:
                    break
                accepted[right] += 1
                right += 1
            start, known = known, known + right + 1
        return accepted

    def _states_of_model(self, token_ids: list[int]) -> Tensor:
        """Return the model's hidden states [T, hidden_size] before its last norm."""
        found: list[Tensor] = []
        hook = self._model.model.norm.register_forward_pre_hook(lambda _, args: found.append(args[0][0]))
        self._model.model(torch.tensor([token_ids]), use_cache=False)
        hook.remove()
        return found[0]

    def _logits(self, layer: int, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return a layer's logits [V] after the last of these tokens [T] and hidden states [T, hidden_size]."""

        def weight(name: str) -> Tensor:
            return self._tensors[f"model.mtp.layers.{layer}.{name}"]

        def norm(name: str, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight(f"{name}.weight")

        embedded = self._model.model.embed_tokens.weight[token_ids]
        x = torch.cat((norm("enorm", embedded), norm("hnorm", hidden)), dim=1) @ weight("eh_proj.weight").T
        normed = norm("input_layernorm", x)
        q, k, v = (normed @ weight(f"self_attn.{name}_proj.weight").T for name in "qkv")
        q, k, v = (
            each.unflatten(1, (-1, dim)).transpose(0, 1) for each, dim in ((q, KEY_DIM), (k, KEY_DIM), (v, VALUE_DIM))
        )
        scores = _rotated(q) @ _rotated(k).transpose(1, 2) * KEY_DIM**-0.5  # as many KV heads as query heads
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        scores = scores.masked_fill((distance < 0) | (distance >= WINDOW), float("-inf"))
        sinks = weight("self_attn.attention_sink_bias")[:, None, None].expand(-1, len(x), 1)
        weights = torch.cat((scores, sinks), dim=2).softmax(2)[:, :, :-1]
        x = x + SCALE * (weights @ v).transpose(0, 1).flatten(1) @ weight("self_attn.o_proj.weight").T
        normed = norm("pre_mlp_layernorm", x)
        gate, up = (normed @ weight(f"mlp.{name}_proj.weight").T for name in ("gate", "up"))
        x = x + (functional.silu(gate) * up) @ weight("mlp.down_proj.weight").T
        logits: Tensor = self._model.lm_head(norm("final_layernorm", x[-1]))
        return logits


def _rotated(x: Tensor) -> Tensor:
    """Apply rotary embeddings to the first dimensions of heads [H, T, key_dim]."""
    frequencies = _ROPE["rope_theta"] ** (-torch.arange(0, ROTARY_DIM, 2) / ROTARY_DIM)
    angles = torch.outer(torch.arange(x.shape[1]), frequencies)
    cos, sin = (each.repeat(1, 2) for each in (angles.cos(), angles.sin()))
    turned, kept = x[..., :ROTARY_DIM], x[..., ROTARY_DIM:]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, kept), dim=-1)

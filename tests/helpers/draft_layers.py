"""Tiny checkpoints with a draft layer behind the last one, under the names that published ones have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.core.sampling import SamplingParams
from baton.kernels.sampling import encode_row, sample_rows

from .checkpoints import DIFFERENCES, SHAPE, edit_config, make_model, write_checkpoint

# Of each architecture: where the draft layer's blocks are, and the tensors around them.
_BEHIND = ("model.layers.{n}.", "model.layers.{n}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
_NAMES = {
    "deepseek_v3": _BEHIND,
    "glm4_moe": _BEHIND,
    "qwen3_next": ("mtp.layers.0.", "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
}


def with_draft_layer(folder: Path, architecture: str, **config: Any) -> Path:
    """Write a checkpoint whose draft layer and what is around it are random; return `folder`.

    The draft layer is one more layer of the model, of the kind with attention.
    """
    num_layers = num_layers_of(architecture)
    kinds = _kinds(architecture)
    write_checkpoint(folder, architecture, num_hidden_layers=num_layers + 1, **kinds, **config)
    tensors = load_file(folder / "model.safetensors")
    layer, around, names = _NAMES[architecture]
    last, layer, around = f"model.layers.{num_layers}.", layer.format(n=num_layers), around.format(n=num_layers)
    tensors = {
        (layer + name.removeprefix(last) if name.startswith(last) else name): tensor for name, tensor in tensors.items()
    }
    size = config.get("hidden_size", SHAPE["hidden_size"])
    generator = torch.Generator().manual_seed(11)
    for name in names:
        is_norm = name not in ("eh_proj", "fc")
        shape = (size,) if is_norm else (size, 2 * size)
        tensors[f"{around}{name}.weight"] = is_norm + 0.1 * torch.randn(shape, generator=generator)
    if _NAMES[architecture] == _BEHIND:  # as published: copies of the model's own
        tensors[f"{around}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{around}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, num_hidden_layers=num_layers, num_nextn_predict_layers=1, **_kinds(architecture, own=True))
    return folder


def num_layers_of(architecture: str) -> int:
    """Return the number of the model's own layers."""
    layers: int = {**SHAPE, **DIFFERENCES[architecture]}["num_hidden_layers"]
    return layers


def _kinds(architecture: str, *, own: bool = False) -> dict[str, Any]:
    kinds = DIFFERENCES[architecture].get("layer_types")
    return {} if kinds is None else {"layer_types": [*kinds, *["full_attention"] * (not own)]}


class GuessReference(Protocol):
    """Guesses tokens behind a text, by layers that are not Baton's."""

    def states_of_model(self, token_ids: list[int]) -> Tensor:
        """Return what it reads of the model, [T, hidden_size]."""
        ...

    def inputs(self, following: list[int], hidden: Tensor) -> Tensor:
        """Return its inputs [T, ...]: `following` are the tokens behind those of `hidden`."""
        ...

    def last(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [V] behind the last of the inputs, and its hidden state [1, hidden_size]."""
        ...


def expected_accepted(
    reference: GuessReference, whole: list[int], num_prompt: int, params: SamplingParams, most: int
) -> list[int]:
    """Return how many drafts are guessed right, by position in their step, of a request by itself."""
    accepted = [0] * most
    table = torch.from_numpy(encode_row(params, seed=params.seed or 0, prompt_len=num_prompt))[None]
    hidden = reference.states_of_model(whole)
    known = num_prompt  # the index of the newest token, which was drawn and not run
    while known + 1 < len(whole):
        inputs = reference.inputs(whole[1 : known + 1], hidden[:known])
        guesses: list[int] = []
        for number in range(min(most, len(whole) - 2 - known)):
            logits, state = reference.last(inputs)
            position = torch.tensor([known + 1 + number])
            guesses.append(int(sample_rows(logits[None], table, torch.tensor([0]), position)))
            inputs = torch.cat((inputs, reference.inputs(guesses[-1:], state)))
        right = 0
        while right < len(guesses) and guesses[right] == whole[known + 1 + right]:
            accepted[right] += 1
            right += 1
        known += right + 1
    return accepted


class DraftReference:
    """The draft layer of a DeepSeek-V3 or GLM-4.5 checkpoint of `with_draft_layer`, by `transformers`' layers."""

    def __init__(self, folder: Path, architecture: str) -> None:
        tensors = load_file(folder / "model.safetensors")
        own = num_layers_of(architecture)
        path = f"model.layers.{own}."
        self._around = {name.removeprefix(path): tensor for name, tensor in tensors.items() if name.startswith(path)}
        model = make_model(architecture, num_hidden_layers=own + 1).eval()  # the same that was written
        self._draft = model.model.layers[own]
        model.model.layers = model.model.layers[:own]
        self._model = model
        self._eps = model.config.rms_norm_eps

    @torch.inference_mode()
    def states_of_model(self, token_ids: list[int]) -> Tensor:
        """Return the model's own hidden states [T, hidden_size] behind its last norm."""
        states: Tensor = self._model.model(torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def inputs(self, following: list[int], hidden: Tensor) -> Tensor:
        """Return what goes into the layer [T, hidden_size]: `following` are the tokens behind those of `hidden`."""
        embedded = self._model.model.embed_tokens(torch.tensor(following))
        both = torch.cat((self._norm("enorm", embedded), self._norm("hnorm", hidden)), dim=1)
        return both @ self._around["eh_proj.weight"].T

    @torch.inference_mode()
    def last(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [V] behind the last of the layer's inputs [T, hidden_size], and its hidden state [1, H]."""
        count, x = len(inputs), inputs[None]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        angles = self._model.model.rotary_emb(x, positions)
        out = self._draft(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        hidden = (out[0] if isinstance(out, tuple) else out)[0, -1:]
        logits: Tensor = self._model.lm_head(self._norm("shared_head.norm", hidden))[0]
        return logits, hidden

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self._around[f"{name}.weight"]

"""Counts of weights, from a model's config.json.

They follow the division of weights (docs/concepts/parallel.md): over tensor-parallel ranks, and for experts that are
spread, over all ranks. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..config import EngineConfig, InvalidEngineConfig
from ..core.layout import DTYPE_BYTES
from ..hf_config.attention import LatentShape, LinearAttentionShape
from ..hf_config.mamba import ATTENTION, MAMBA, MLP, MambaShape
from ..hf_config.model_config import Eagle3Shape, ModelConfig

_GB = 1e9


@dataclass(frozen=True)
class Weights:
    """Counts of one rank's weights, by their type in memory."""

    plain: float  # always in the model's dtype
    narrow: float  # in 8 bits on a GPU with FP8 tensor cores
    wide: float = 0.0  # in float32

    def num_bytes(self, model: ModelConfig, *, has_fp8: bool) -> int:
        """Return the bytes on a device. Without FP8 tensor cores, weights of 8 bits become the model's dtype."""
        wide = DTYPE_BYTES[model.dtype]
        narrow = model.quantization.weight_bytes if has_fp8 and model.quantization is not None else wide
        return int(self.plain * wide + self.narrow * narrow + self.wide * DTYPE_BYTES["float32"])


def weight_bytes_of_rank(model: ModelConfig, config: EngineConfig, *, has_fp8: bool) -> int:
    """Return the bytes of one rank's weights, including its draft model's. `has_fp8`: the GPU has FP8 tensor cores."""
    num_bytes = weights_of_rank(model, config).num_bytes(model, has_fp8=has_fp8)
    return num_bytes + draft_model_bytes_of_rank(model, config, has_fp8=has_fp8)


def draft_model_bytes_of_rank(model: ModelConfig, config: EngineConfig, *, has_fp8: bool) -> int:
    """Return the bytes of one rank's draft model or head; 0 if there is none."""
    if (draft_model := model.draft_model) is None:
        return 0
    divided = config.model_copy(update={"enable_expert_parallel": False})
    return weights_of_rank(draft_model, divided).num_bytes(draft_model, has_fp8=has_fp8)


def check_weights_fit(model: ModelConfig, config: EngineConfig, memory_bytes: int, *, has_fp8: bool) -> None:
    """Raise `InvalidEngineConfig` if one rank's weights take more than `memory_bytes`.

    The error names the draft model if the model would fit without it.
    """
    total = weight_bytes_of_rank(model, config, has_fp8=has_fp8)
    if total <= memory_bytes:
        return
    drafting = draft_model_bytes_of_rank(model, config, has_fp8=has_fp8)
    there = f"a rank has {memory_bytes / _GB:.1f} GB for them"
    if model.draft_model is not None and total - drafting <= memory_bytes:
        name, alone = model.draft_model.folder.name, (total - drafting) / _GB
        raise InvalidEngineConfig(
            "speculative_config.model",
            f"the weights of {name} take {drafting / _GB:.1f} GB beside the {alone:.1f} GB of the model's, and "
            f"{there}: give a smaller draft model, or raise tensor_parallel_size",
        )
    raise InvalidEngineConfig(
        "model",
        f"its weights take {total / _GB:.1f} GB, and {there}: raise tensor_parallel_size, or use devices with more "
        "memory",
    )


def weights_of_rank(model: ModelConfig, config: EngineConfig) -> Weights:
    """Count the weights of one rank, the same number on all ranks."""
    ranks = config.tensor_parallel_size
    if model.eagle3 is not None:
        return Weights(_eagle3(model, model.eagle3, ranks), 0)
    embeddings = model.vocab_size * model.hidden_size / ranks * (1 if model.tie_word_embeddings else 2)
    norms = (_norms_of_layers(model) + 1) * model.hidden_size
    # Draft layers are counted with the others. Each also has a projection of twice the width, and three norms.
    norms += model.num_run_draft_layers * (2 * model.hidden_size + 3) * model.hidden_size
    plain, narrow, wide = embeddings + norms + _other_weights(model, ranks), 0.0, 0.0
    if model.layer_inputs is not None:
        plain += model.num_layers * model.layer_inputs.vocab_size * model.layer_inputs.width / ranks
    for matrix in _matrices(model, ranks):
        if matrix.stays_narrow(model):
            narrow += matrix.size
        else:
            plain += matrix.size
    for layer in _mixtures(model):
        router, routed = _mixture(model, config)
        if model.moe is not None and model.moe.wide_router:
            wide += router
        else:
            plain += router
        if _experts_stay_narrow(model, config, layer):
            narrow += routed
        else:
            plain += routed
    return Weights(plain, narrow, wide)


def _eagle3(model: ModelConfig, shape: Eagle3Shape, ranks: int) -> float:
    """Count the weights of an EAGLE-3 head, whose projections of queries, keys and values read two hidden states."""
    hidden, dim, heads = model.hidden_size, model.head_dim, model.num_heads / ranks
    kv_heads = max(1, model.num_kv_heads // ranks)
    layer = dim * (2 * (heads + 2 * kv_heads) + heads) + 3 * model.intermediate_size / ranks
    return hidden * (len(shape.layers) * hidden + layer + shape.vocab_size / ranks + 4)


def active_weights(model: ModelConfig, tensor_parallel_size: int) -> float:
    """Count the weights of all layers on one rank that a token is multiplied with; of experts, those chosen for it.

    If experts are spread over data-parallel ranks, it is the average: each rank gets as many tokens as it sends.
    """
    ranks = tensor_parallel_size
    weights = _other_weights(model, ranks) + sum(matrix.size for matrix in _matrices(model, ranks))
    if model.moe is not None:
        width = model.moe.latent_size or model.hidden_size
        routed = _matrices_of_mlp(model) * model.moe.top_k * model.moe.intermediate_size * width
        weights += len(_mixtures(model)) * (routed / ranks + model.moe.num_experts * model.hidden_size)
    return weights


class _Part(NamedTuple):
    """The rows of a matrix that come from one of its merged layers, or the columns of the matrix."""

    names: tuple[str, ...]  # of the layer in checkpoints: one for each way to store it
    whole: int
    share: float  # on one rank
    stretches: tuple[float, ...] = ()  # widths of the pieces that it consists of: no scale block may span two pieces

    @classmethod
    def all(cls, whole: int, *names: str) -> _Part:
        return cls(names, whole, whole)


@dataclass(frozen=True)
class _Matrix:
    """A matrix of a layer, as it is on one rank."""

    path: str
    rows: tuple[_Part, ...]
    columns: _Part

    @property
    def size(self) -> float:
        return sum(part.share for part in self.rows) * self.columns.share

    def stays_narrow(self, model: ModelConfig) -> bool:
        """Return whether it stays in 8 bits on a GPU: `Fp8Linear.fits`, if the checkpoint has its layers quantized."""
        quantization = model.quantization
        if quantization is None:
            return False
        if not all(quantization.covers(f"{self.path}.{name}") for part in self.rows for name in part.names):
            return False
        borders: list[float] = [self.columns.whole, *(part.whole for part in self.rows[:-1])]
        for part in (self.columns, *self.rows):
            borders += [*part.stretches, *([part.share] if part.share != part.whole else [])]
        return quantization.keeps_linear(*borders)


def _matrices(model: ModelConfig, ranks: int) -> Iterator[_Matrix]:
    """Yield the matrices of all layers on a rank, except experts and the matrices counted by `_other_weights`."""
    for layer in range(model.num_run_layers):
        path = _path_of(model, layer)
        if _has_recurrence(model, layer):
            yield from _recurrent(model, path, ranks)
        if _has_attention(model, layer):
            if model.latent is None:
                yield from _attention(model, layer, path, ranks)
            else:
                yield from _latent_attention(model, model.latent, path, ranks)
        if _has_mlp(model, layer):
            yield from _mlp(model, path, ("mlp", "feed_forward", "mixer"), model.mlp_width(layer), ranks)
        if layer in _mixtures(model):
            yield from _beside_experts(model, path, ranks)
        if model.layer_inputs is not None and layer < model.num_layers:
            width, hidden = model.layer_inputs.width, model.hidden_size
            yield _Matrix(path, (_Part.all(width, "per_layer_input_gate"),), _Part.all(hidden))
            yield _Matrix(path, (_Part.all(hidden, "per_layer_projection"),), _Part.all(width))
            yield _Matrix("model", (_Part.all(width, "per_layer_model_projection"),), _Part.all(hidden))  # its part


def _path_of(model: ModelConfig, layer: int) -> str:
    """Return the path of a layer's weights in checkpoints."""
    if layer >= model.num_layers and model.rules.draft is not None:
        path = model.rules.draft.path(model, layer - model.num_layers)
        return ".".join(filter(None, (path, model.rules.draft.layer)))
    return f"{model.rules.names.get('model', 'model')}.layers.{layer}"


def _has_attention(model: ModelConfig, layer: int) -> bool:
    if model.mamba is not None:
        return model.mamba.has(layer, ATTENTION)
    return model.linear is None or not model.linear.layers[layer]


def _has_recurrence(model: ModelConfig, layer: int) -> bool:
    """Return whether a layer has linear attention or Mamba-2."""
    if model.mamba is not None:
        return model.mamba.has(layer, MAMBA)
    return model.linear is not None and model.linear.layers[layer]


def _has_mlp(model: ModelConfig, layer: int) -> bool:
    """Return whether a layer has an MLP that is neither an expert nor shared by them."""
    if model.mamba is not None:
        return model.mamba.has(layer, MLP)
    return model.moe is None or model.moe.beside_mlp or not model.moe.sparse_layers[layer]


def _attention(model: ModelConfig, layer: int, path: str, ranks: int) -> Iterator[_Matrix]:
    heads, count = model.heads_of(layer), model.num_heads
    kv_heads, held = heads.num_kv_heads, max(1, heads.num_kv_heads // ranks)
    of_query = heads.key_dim * (2 if model.rules.attention.gated else 1)
    rows = [_divided(count * of_query, ranks, "self_attn.q_proj", "mixer.q_proj")]
    if model.kv_source(layer) == layer:
        rows.append(_Part(("self_attn.k_proj", "mixer.k_proj"), kv_heads * heads.key_dim, held * heads.key_dim))
        if heads.projects_values:
            names = ("self_attn.v_proj", "mixer.v_proj")
            rows.append(_Part(names, kv_heads * heads.value_dim, held * heads.value_dim))
    yield _Matrix(path, tuple(rows), _Part.all(model.hidden_size))
    output = _Part.all(model.hidden_size, "self_attn.o_proj", "mixer.o_proj")
    yield _Matrix(path, (output,), _divided(count * heads.value_dim, ranks))


def _latent_attention(model: ModelConfig, shape: LatentShape, path: str, ranks: int) -> Iterator[_Matrix]:
    """Yield the matrices of latent attention, except the up-projection of keys and values."""
    hidden, path = _Part.all(model.hidden_size), f"{path}.self_attn"
    queries = model.num_heads * shape.head_dim
    down = _Part.all(shape.rank + shape.rope_dim, "kv_a_proj_with_mqa")
    if shape.q_rank is None:
        yield _Matrix(path, (_divided(queries, ranks, "q_proj"), down), hidden)
    else:
        yield _Matrix(path, (_Part.all(shape.q_rank, "q_a_proj"), down), hidden)
        yield _Matrix(path, (_divided(queries, ranks, "q_b_proj"),), _Part.all(shape.q_rank))
    values = _divided(model.num_heads * shape.value_dim, ranks)
    yield _Matrix(path, (_Part.all(model.hidden_size, "o_proj"),), values)


def _recurrent(model: ModelConfig, path: str, ranks: int) -> Iterator[_Matrix]:
    if model.mamba is not None:
        return _mamba(model, model.mamba, path, ranks)
    assert model.linear is not None, "a layer with states has one of them"
    if model.linear.gate_rank is None:
        return _delta_net(model, model.linear, f"{path}.linear_attn", ranks)
    return _kimi_delta(model, model.linear, model.linear.gate_rank, f"{path}.self_attn", ranks)


def _mamba(model: ModelConfig, shape: MambaShape, path: str, ranks: int) -> Iterator[_Matrix]:
    width, groups = shape.width / ranks, _mamba_groups(shape, ranks)
    parts = (width, width, groups, groups, shape.num_heads / ranks)
    names = ("mamba.in_proj", "mixer.in_proj")
    stretches = parts if ranks > 1 else parts[:-1]
    yield _Matrix(path, (_Part(names, sum(shape.parts), sum(parts), stretches),), _Part.all(model.hidden_size))
    output = _Part.all(model.hidden_size, "mamba.out_proj", "mixer.out_proj")
    yield _Matrix(path, (output,), _divided(shape.width, ranks))


def _mamba_groups(shape: MambaShape, ranks: int) -> int:
    """Return the width of B on a rank, which is also that of C."""
    return max(1, shape.num_groups // ranks) * shape.state_dim


def _delta_net(model: ModelConfig, shape: LinearAttentionShape, path: str, ranks: int) -> Iterator[_Matrix]:
    hidden, heads = _Part.all(model.hidden_size), shape.num_value_heads
    keys, values = shape.key_width, shape.value_width
    names = ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "q_proj", "k_proj", "v_proj", "g_proj")
    widths = (keys / ranks, values / ranks)
    yield _Matrix(path, (_Part(names, 2 * (keys + values), 2 * sum(widths), widths),), hidden)
    gates = _divided(heads, ranks, "in_proj_b", "b_proj"), _divided(heads, ranks, "in_proj_a", "a_proj", "in_proj_ba")
    yield _Matrix(path, gates, hidden)
    yield _Matrix(path, (_Part.all(model.hidden_size, "out_proj", "o_proj"),), _divided(values, ranks))


def _kimi_delta(
    model: ModelConfig, shape: LinearAttentionShape, gate_rank: int, path: str, ranks: int
) -> Iterator[_Matrix]:
    hidden, rank, keys, values = _Part.all(model.hidden_size), gate_rank, shape.key_width, shape.value_width
    qkv = _divided(keys, ranks, "q_proj"), _divided(keys, ranks, "k_proj"), _divided(values, ranks, "v_proj")
    yield _Matrix(path, qkv, hidden)
    gates = _Part.all(rank, "f_a_proj"), _Part.all(rank, "g_a_proj"), _divided(shape.num_value_heads, ranks, "b_proj")
    yield _Matrix(path, gates, hidden)
    yield _Matrix(path, (_divided(keys, ranks, "f_b_proj"),), _Part.all(rank))
    yield _Matrix(path, (_divided(values, ranks, "g_b_proj"),), _Part.all(rank))
    yield _Matrix(path, (_Part.all(model.hidden_size, "o_proj"),), _divided(values, ranks))


def _mlp(model: ModelConfig, path: str, places: tuple[str, ...], width: int, ranks: int) -> Iterator[_Matrix]:
    """Yield the matrices of an MLP, which checkpoints store at one of these places below the layer's path."""
    uppers = ("gate_proj", "up_proj")[-(_matrices_of_mlp(model) - 1) :]
    rows = tuple(_divided(width, ranks, *(f"{place}.{name}" for place in places)) for name in uppers)
    yield _Matrix(path, rows, _Part.all(model.hidden_size))
    output = _Part.all(model.hidden_size, *(f"{place}.down_proj" for place in places))
    yield _Matrix(path, (output,), _divided(width, ranks))


def _beside_experts(model: ModelConfig, path: str, ranks: int) -> Iterator[_Matrix]:
    """Yield the matrices of a mixture's shared experts, and its latent projections, which every rank has in full."""
    assert model.moe is not None, "only mixtures have experts"
    if model.moe.shared_intermediate_size:
        places = ("mlp.shared_expert", "mlp.shared_experts", "block_sparse_moe.shared_experts", "mixer.shared_experts")
        yield from _mlp(model, path, (*places, "shared_mlp"), model.moe.shared_intermediate_size, ranks)
    if (latent := model.moe.latent_size) is not None:
        yield _Matrix(path, (_Part.all(latent, "mixer.fc1_latent_proj"),), _Part.all(model.hidden_size))
        yield _Matrix(path, (_Part.all(model.hidden_size, "mixer.fc2_latent_proj"),), _Part.all(latent))


def _divided(whole: int, ranks: int, *names: str) -> _Part:
    return _Part(names, whole, whole / ranks)


def _other_weights(model: ModelConfig, ranks: int) -> float:
    """Count the weights of layers on a rank outside linear layers: convolutions, Mamba-2's norms, and, of latent
    attention, the up-projection of keys and values.
    """
    layers = range(model.num_run_layers)
    attention = sum(_has_attention(model, layer) for layer in layers)
    recurrent = sum(_has_recurrence(model, layer) for layer in layers)
    count = 0.0
    if (latent := model.latent) is not None:
        count += attention * latent.rank * model.num_heads / ranks * (latent.nope_dim + latent.value_dim)
    if (mamba := model.mamba) is not None:
        width = mamba.width / ranks
        channels = width + 2 * _mamba_groups(mamba, ranks)
        count += recurrent * (channels * (mamba.conv_width + mamba.conv_bias) + width)
    elif (linear := model.linear) is not None:
        count += recurrent * linear.conv_channels * linear.conv_width / ranks
    return count


def _norms_of_layers(model: ModelConfig) -> int:
    """Count the norms of hidden states: in each layer one before the mixer, and one before the MLP."""
    if model.mamba is None:
        return 2 * model.num_run_layers
    return sum(min(2, len(blocks)) for blocks in model.mamba.blocks)


def _matrices_of_mlp(model: ModelConfig) -> int:
    """Return the number of matrices of an MLP or an expert: those without gates lack the third one."""
    return 2 if model.rules.activation == "relu2" else 3


def _mixtures(model: ModelConfig) -> list[int]:
    """Return the layers with experts."""
    return [] if model.moe is None else [layer for layer, sparse in enumerate(model.moe.sparse_layers) if sparse]


def _mixture(model: ModelConfig, config: EngineConfig) -> tuple[float, float]:
    """Count the weights of one mixture layer on a rank: of the router, and of the routed experts."""
    experts = model.moe
    assert experts is not None, "only mixtures have experts"
    one = _matrices_of_mlp(model) * (experts.latent_size or model.hidden_size) * experts.intermediate_size
    if config.enable_expert_parallel:
        routed = one * (experts.num_experts + config.num_redundant_experts) / config.world_size
    else:
        routed = one * experts.num_experts / config.tensor_parallel_size
    return experts.num_experts * model.hidden_size, routed


def _experts_stay_narrow(model: ModelConfig, config: EngineConfig, layer: int) -> bool:
    """Return whether a rank's experts of a layer stay in 8 bits on a GPU."""
    experts, quantization = model.moe, model.quantization
    assert experts is not None, "only mixtures have experts"
    if quantization is None or experts.stored != "each":
        return False
    places, path = ("mlp", "block_sparse_moe", "mixer"), _path_of(model, layer)
    names = [f"{path}.{place}.experts.0.{name}" for place in places for name in experts.projections]
    width = experts.intermediate_size
    share = width if config.enable_expert_parallel else width // config.tensor_parallel_size
    depth = experts.latent_size or model.hidden_size
    return quantization.keeps_experts(depth, share, width) and all(quantization.covers(name) for name in names)

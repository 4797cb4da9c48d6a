"""Counts of weights, from a model's config.json.

They are counted as they are divided (docs/concepts/parallel.md): over tensor-parallel ranks, and experts over all
ranks where they are spread. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import EngineConfig
from ..core.layout import DTYPE_BYTES
from ..hf_config.attention import LinearAttentionShape
from ..hf_config.mamba import ATTENTION, MAMBA
from ..hf_config.model_config import Eagle3Shape, ModelConfig


@dataclass(frozen=True)
class Weights:
    """Counts of one rank's weights, by whether they stay in 8 bits where the checkpoint and the device allow it."""

    plain: float  # in the model's dtype in any case
    narrow: float  # in 8 bits

    def num_bytes(self, model: ModelConfig, device: str) -> int:
        """Return the bytes on a "cuda" or "cpu" device; a CPU has no kernels for 8 bits, and converts them."""
        wide = DTYPE_BYTES[model.dtype]
        narrow = wide if model.quantization is None or device != "cuda" else model.quantization.weight_bytes
        return int(self.plain * wide + self.narrow * narrow)


def weight_bytes_of_rank(model: ModelConfig, config: EngineConfig, device: str) -> int:
    """Return the bytes of one rank's weights on a "cuda" or "cpu" device, those of its draft model among them."""
    num_bytes = weights_of_rank(model, config).num_bytes(model, device)
    if (draft_model := model.draft_model) is not None:
        divided = config.model_copy(update={"enable_expert_parallel": False})
        num_bytes += weights_of_rank(draft_model, divided).num_bytes(draft_model, device)
    return num_bytes


def weights_of_rank(model: ModelConfig, config: EngineConfig) -> Weights:
    """Count the weights of one rank; all ranks have as many."""
    ranks = config.tensor_parallel_size
    if model.eagle3 is not None:
        return Weights(_eagle3(model, model.eagle3, ranks), 0)
    embeddings = model.vocab_size * model.hidden_size / ranks * (1 if model.tie_word_embeddings else 2)
    norms = (_norms_of_layers(model) + 1) * model.hidden_size
    # Draft layers are counted with the others; a projection, of two, and three norms are their own.
    norms += model.drafts * (2 * model.hidden_size + 3) * model.hidden_size
    mixers = _mixers(model, ranks)
    attention, latents = _attention_of_layers(model, mixers, ranks)
    plain = embeddings + norms + latents
    narrow = attention + mixers.of_recurrent * mixers.recurrent
    narrow += _matrices(model) * model.hidden_size * _mlp_widths(model) / ranks
    if model.layer_inputs is not None:
        table, others = _layer_inputs(model)
        plain, narrow = plain + table / ranks, narrow + others
    for _ in range(_num_mixtures(model)):
        router, shared, routed = _mixture(model, config)
        plain, narrow = plain + router, narrow + shared
        if _experts_stay_narrow(model, config):
            narrow += routed
        else:
            plain += routed
    return Weights(plain, narrow)


def _eagle3(model: ModelConfig, shape: Eagle3Shape, ranks: int) -> float:
    """Count the weights of an EAGLE-3 head, whose projections of queries, keys and values read two hidden states."""
    hidden, dim, heads = model.hidden_size, model.head_dim, model.num_heads / ranks
    kv_heads = max(1, model.num_kv_heads // ranks)
    layer = dim * (2 * (heads + 2 * kv_heads) + heads) + 3 * model.intermediate_size / ranks
    return hidden * (len(shape.layers) * hidden + layer + shape.vocab_size / ranks + 4)


def active_weights(model: ModelConfig, tensor_parallel_size: int) -> float:
    """Count the weights of all layers of one rank that a token is multiplied with: of the experts, those of its choice.

    With experts spread over data-parallel ranks it is the average: tokens of other ranks come for those that go.
    """
    ranks = tensor_parallel_size
    mixers, matrices = _mixers(model, ranks), _matrices(model)
    weights = sum(_attention_of_layers(model, mixers, ranks)) + mixers.of_recurrent * mixers.recurrent
    weights += matrices * model.hidden_size * _mlp_widths(model) / ranks
    if model.layer_inputs is not None:
        weights += _layer_inputs(model)[1]
    if model.moe is not None:
        latent = model.moe.latent_size
        routed = matrices * model.moe.top_k * model.moe.intermediate_size * (latent or model.hidden_size)
        shared = matrices * model.moe.shared_intermediate_size * model.hidden_size
        router = (model.moe.num_experts + 2 * (latent or 0)) * model.hidden_size
        weights += _num_mixtures(model) * ((routed + shared) / ranks + router)
    return weights


def _attention_of_layers(model: ModelConfig, mixers: _Mixers, ranks: int) -> tuple[float, float]:
    """Count the weights of all layers' attention, as `_attention` does."""
    if model.full_heads is None:
        projections, up = _attention(model, ranks)
        return projections * mixers.attention, up * mixers.attention
    weights = 0.0
    for layer in range(model.num_run_layers):
        heads = model.heads_of(layer)
        queries, kv_heads = model.num_heads / ranks, max(1, heads.num_kv_heads // ranks)
        weights += model.hidden_size * queries * (heads.key_dim + heads.value_dim)
        if model.kv_source(layer) == layer:
            weights += model.hidden_size * kv_heads * (heads.key_dim + heads.projects_values * heads.value_dim)
    return weights, 0


def _attention(model: ModelConfig, ranks: int) -> tuple[float, float]:
    """Count a layer's attention weights: those that may be in 8 bits, and a latent's up-projections, which may not."""
    hidden, heads = model.hidden_size, model.num_heads / ranks
    if (latent := model.latent) is None:
        kv_heads = max(1, model.num_kv_heads // ranks)
        queries = 2 * heads if model.rules.has_gated_heads else heads
        return hidden * model.head_dim * (queries + heads + 2 * kv_heads), 0
    if latent.q_rank is None:
        queries = hidden * heads * latent.head_dim
    else:
        queries = hidden * latent.q_rank + latent.q_rank * heads * latent.head_dim
    down = hidden * (latent.rank + latent.rope_dim)
    up = latent.rank * heads * (latent.nope_dim + latent.value_dim)
    return queries + down + heads * latent.value_dim * hidden, up


@dataclass(frozen=True)
class _Mixers:
    """The numbers of layers with each kind of mixer, and the weights of a recurrent one on one rank."""

    attention: int
    recurrent: int = 0
    of_recurrent: float = 0


def _mixers(model: ModelConfig, ranks: int) -> _Mixers:
    """Count the layers with attention, and those with linear attention or Mamba-2."""
    if model.mamba is not None:
        shape = model.mamba
        groups = max(1, shape.num_groups // ranks) * shape.state_dim  # the width of B on a rank, and of C
        width, heads = shape.width / ranks, shape.num_heads / ranks
        projections = 3 * width + 2 * groups + heads
        weights = model.hidden_size * projections + (width + 2 * groups) * (shape.conv_width + shape.conv_bias)
        return _Mixers(shape.count(ATTENTION), shape.count(MAMBA), weights + width)
    if model.linear is not None:
        linear = model.linear
        recurrent = sum(linear.layers)
        return _Mixers(model.num_run_layers - recurrent, recurrent, _linear(linear, model.hidden_size, ranks))
    return _Mixers(model.num_run_layers)


def _linear(shape: LinearAttentionShape, hidden: int, ranks: int) -> float:
    """Count the weights of one layer of linear attention."""
    heads, values, conv = shape.num_value_heads, shape.value_width, shape.conv_channels * shape.conv_width
    if shape.gate_rank is None:
        return (hidden * (shape.conv_channels + 2 * values + 2 * heads) + conv) / ranks
    divided = hidden * (shape.conv_channels + values + heads) + conv
    divided += shape.gate_rank * (shape.num_value_heads * shape.key_dim + values)  # to decays, and to gates
    return divided / ranks + 2 * hidden * shape.gate_rank


def _norms_of_layers(model: ModelConfig) -> int:
    """Count the norms of hidden states: one before the mixers of a layer, one before its MLP."""
    if model.mamba is None:
        return 2 * model.num_run_layers
    return sum(min(2, len(blocks)) for blocks in model.mamba.blocks)


def _mlp_widths(model: ModelConfig) -> int:
    """Return the widths of all MLPs that are no mixtures, added up."""
    if not model.doubles_shared_mlps:
        return model.num_mlps * model.intermediate_size
    return sum(model.mlp_width(layer) for layer in range(model.num_layers))


def _layer_inputs(model: ModelConfig) -> tuple[int, int]:
    """Count the weights of the table of per-layer embeddings, and of the projections around them, of all layers."""
    assert model.layer_inputs is not None, "few models have per-layer embeddings"
    shape = model.layer_inputs
    return model.num_layers * shape.vocab_size * shape.width, 3 * model.num_layers * shape.width * model.hidden_size


def _matrices(model: ModelConfig) -> int:
    """Return the number of matrices of an MLP and of an expert: without gates they have no third one."""
    return 2 if model.rules.activation == "relu2" else 3


def _num_mixtures(model: ModelConfig) -> int:
    return 0 if model.moe is None else sum(model.moe.sparse_layers)


def _mixture(model: ModelConfig, config: EngineConfig) -> tuple[float, float, float]:
    """Count the weights of one mixture layer: the router, the shared expert, the routed experts."""
    experts = model.moe
    assert experts is not None, "only mixtures have experts"
    one = _matrices(model) * (experts.latent_size or model.hidden_size) * experts.intermediate_size
    if config.enable_expert_parallel:
        routed = one * (experts.num_experts + config.num_redundant_experts) / config.world_size
    else:
        routed = one * experts.num_experts / config.tensor_parallel_size
    shared = _matrices(model) * model.hidden_size * experts.shared_intermediate_size / config.tensor_parallel_size
    latents = 2 * (experts.latent_size or 0) * model.hidden_size  # to experts and back, on every rank
    return experts.num_experts * model.hidden_size + latents, shared, routed


def _experts_stay_narrow(model: ModelConfig, config: EngineConfig) -> bool:
    """Return whether a rank's experts stay in 8 bits on a GPU."""
    assert model.moe is not None, "only mixtures have experts"
    width = model.moe.intermediate_size
    if not config.enable_expert_parallel:
        width //= config.tensor_parallel_size
    return model.quantization is not None and model.quantization.keeps_experts(model.hidden_size, width)

"""Counts of weights, from a model's config.json.

They are counted as they are divided (docs/concepts/parallel.md): over tensor-parallel ranks, and experts over all
ranks where they are spread. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import EngineConfig
from ..core.layout import DTYPE_BYTES
from ..hf_config.model_config import ModelConfig


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


def weights_of_rank(model: ModelConfig, config: EngineConfig) -> Weights:
    """Count the weights of one rank; all ranks have as many."""
    ranks = config.tensor_parallel_size
    embeddings = model.vocab_size * model.hidden_size / ranks * (1 if model.tie_word_embeddings else 2)
    norms = (2 * model.num_layers + 1) * model.hidden_size
    sparse = model.moe.sparse_layers if model.moe is not None else (False,) * model.num_layers
    attention, latents = _attention(model, ranks)
    linear, of_linear = _linear_attention(model, ranks)
    plain = embeddings + norms + latents * (model.num_layers - linear)
    narrow = attention * (model.num_layers - linear) + of_linear * linear
    for is_mixture in sparse:
        if not is_mixture:
            narrow += 3 * model.hidden_size * model.intermediate_size / ranks
            continue
        router, shared, routed = _mixture(model, config)
        plain, narrow = plain + router, narrow + shared
        if _experts_stay_narrow(model, config):
            narrow += routed
        else:
            plain += routed
    return Weights(plain, narrow)


def active_weights(model: ModelConfig, tensor_parallel_size: int) -> float:
    """Count the weights of all layers of one rank that a token is multiplied with: of the experts, those of its choice.

    With experts spread over data-parallel ranks it is the average: tokens of other ranks come for those that go.
    """
    ranks = tensor_parallel_size
    sparse = model.moe.sparse_layers if model.moe is not None else (False,) * model.num_layers
    linear, of_linear = _linear_attention(model, ranks)
    weights = sum(_attention(model, ranks)) * (model.num_layers - linear) + of_linear * linear
    weights += sparse.count(False) * 3 * model.hidden_size * model.intermediate_size / ranks
    if model.moe is not None:
        used = model.moe.top_k * model.moe.intermediate_size + model.moe.shared_intermediate_size
        weights += sparse.count(True) * model.hidden_size * (3 * used / ranks + model.moe.num_experts)
    return weights


def _attention(model: ModelConfig, ranks: int) -> tuple[float, float]:
    """Count a layer's attention weights: those that may be in 8 bits, and a latent's up-projections, which may not."""
    hidden, heads = model.hidden_size, model.num_heads / ranks
    if (latent := model.latent) is None:
        kv_heads = max(1, model.num_kv_heads // ranks)
        queries = 2 * heads if model.linear is not None else heads  # hybrids have a gate beside each
        return hidden * model.head_dim * (queries + heads + 2 * kv_heads), 0
    if latent.q_rank is None:
        queries = hidden * heads * latent.head_dim
    else:
        queries = hidden * latent.q_rank + latent.q_rank * heads * latent.head_dim
    down = hidden * (latent.rank + latent.rope_dim)
    up = latent.rank * heads * (latent.nope_dim + latent.value_dim)
    return queries + down + heads * latent.value_dim * hidden, up


def _linear_attention(model: ModelConfig, ranks: int) -> tuple[int, float]:
    """Count the layers of linear attention, and the weights of each on one rank."""
    shape = model.linear
    if shape is None:
        return 0, 0
    projections = shape.conv_channels + 2 * shape.value_width + 2 * shape.num_value_heads
    weights = model.hidden_size * projections + shape.conv_channels * shape.conv_width
    return sum(shape.layers), weights / ranks


def _mixture(model: ModelConfig, config: EngineConfig) -> tuple[float, float, float]:
    """Count the weights of one mixture layer: the router, the shared expert, the routed experts."""
    experts = model.moe
    assert experts is not None, "only mixtures have experts"
    one = 3 * model.hidden_size * experts.intermediate_size
    if config.enable_expert_parallel:
        routed = one * (experts.num_experts + config.num_redundant_experts) / config.world_size
    else:
        routed = one * experts.num_experts / config.tensor_parallel_size
    shared = 3 * model.hidden_size * experts.shared_intermediate_size / config.tensor_parallel_size
    return experts.num_experts * model.hidden_size, shared, routed


def _experts_stay_narrow(model: ModelConfig, config: EngineConfig) -> bool:
    """Return whether a rank's experts stay in 8 bits on a GPU."""
    assert model.moe is not None, "only mixtures have experts"
    width = model.moe.intermediate_size
    if not config.enable_expert_parallel:
        width //= config.tensor_parallel_size
    return model.quantization is not None and model.quantization.keeps_experts(model.hidden_size, width)

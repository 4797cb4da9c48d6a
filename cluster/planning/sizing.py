"""Sizes from a model's config.json: bytes of weights and KV blocks on each rank, memory and disk on each host.

Weights are counted as they are divided (docs/concepts/parallel.md): over tensor-parallel ranks, and experts over all
ranks where they are spread. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.cluster.contracts import Role
from baton.cluster.spec import FleetSpec
from baton.engine.config import EngineConfig
from baton.engine.core.layout import DTYPE_BYTES
from baton.engine.hf_config.model_config import ModelConfig

GB = 10**9


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
    plain, narrow = embeddings + norms + latents * model.num_layers, attention * model.num_layers
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


def _attention(model: ModelConfig, ranks: int) -> tuple[float, float]:
    """Count a layer's attention weights: those that may be in 8 bits, and a latent's up-projections, which may not."""
    hidden, heads = model.hidden_size, model.num_heads / ranks
    if (latent := model.latent) is None:
        kv_heads = len(model.layout.heads_of(0, ranks))
        return hidden * model.head_dim * (2 * heads + 2 * kv_heads), 0
    if latent.q_rank is None:
        queries = hidden * heads * latent.head_dim
    else:
        queries = hidden * latent.q_rank + latent.q_rank * heads * latent.head_dim
    down = hidden * (latent.rank + latent.rope_dim)
    up = latent.rank * heads * (latent.nope_dim + latent.value_dim)
    return queries + down + heads * latent.value_dim * hidden, up


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


def block_bytes(model: ModelConfig, tensor_parallel_size: int) -> Iterator[int]:
    """Yield the bytes of one KV block on each tensor-parallel rank."""
    layout = model.layout
    for rank in range(tensor_parallel_size):
        yield len(layout.heads_of(rank, tensor_parallel_size)) * layout.head_bytes


@dataclass(frozen=True)
class HostNeeds:
    """Bytes of host memory and disk, of one worker or of all workers of one node."""

    tiers: int = 0  # `kv_tiers.host_bytes`
    buffer: int = 0  # `transfer.buffer_bytes`
    model: int = 0  # weights, blocks and steps where there is no GPU
    disk: int = 0  # `kv_tiers.disk_bytes`

    @property
    def memory(self) -> int:
        return self.tiers + self.buffer + self.model

    def __add__(self, other: HostNeeds) -> HostNeeds:
        return HostNeeds(
            self.tiers + other.tiers, self.buffer + other.buffer, self.model + other.model, self.disk + other.disk
        )


def needs_of_worker(spec: FleetSpec, role: Role, model: int) -> HostNeeds:
    """Return the needs of one worker; `model`: bytes of the model that are in the host's memory."""
    tiers, transfer = spec.fleets.present[role].kv_tiers, spec.transfer_settings()
    by_host = role is not Role.UNIFIED and transfer.buffer == "host"
    return HostNeeds(
        tiers=0 if tiers is None else tiers.host_bytes,
        buffer=transfer.buffer_bytes if by_host else 0,
        model=model,
        disk=0 if tiers is None else tiers.disk_bytes,
    )


def needs_of_nodes(workers: Sequence[tuple[int, HostNeeds]]) -> list[HostNeeds]:
    """Return the needs of each node, given the node and the needs of each worker."""
    nodes = [HostNeeds()] * (max((node for node, _ in workers), default=-1) + 1)
    for node, needs in workers:
        nodes[node] += needs
    return nodes


def find_overcommitted(nodes: Sequence[HostNeeds], memory_bytes: int | None, disk_bytes: int | None) -> Iterator[str]:
    """Yield a line for each node that has too little memory or disk; None: not known."""
    for node, needs in enumerate(nodes):
        if memory_bytes is not None and needs.memory > memory_bytes:
            parts = (
                ("kv_tiers.host_bytes", needs.tiers),
                ("transfer.buffer_bytes", needs.buffer),
                ("models", needs.model),
            )
            named = ", ".join(f"{size / GB:.1f} GB of {name}" for name, size in parts if size)
            yield (
                f"node {node}: its workers take {needs.memory / GB:.1f} GB of the host's memory ({named}), it has"
                f" {memory_bytes / GB:g}: give less, or fewer workers a node"
            )
        if disk_bytes is not None and needs.disk > disk_bytes:
            yield (
                f"node {node}: its workers take {needs.disk / GB:.1f} GB of disk (kv_tiers.disk_bytes), it has"
                f" {disk_bytes / GB:g}: give less, or fewer workers a node"
            )

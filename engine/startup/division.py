"""Checks whether a model can be divided over ranks as the arguments ask, from its config alone, before any start."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import EngineConfig, InvalidEngineConfig
from ..core.layout import UnevenHeads
from ..hf_config.model_config import ModelConfig


def check_division(model: ModelConfig, config: EngineConfig) -> None:
    """Raise `InvalidEngineConfig`, naming the argument, if something cannot be divided over the ranks."""
    ranks = config.tensor_parallel_size
    if model.has_states and config.disable_hybrid_kv_cache_manager:
        raise InvalidEngineConfig(
            "disable_hybrid_kv_cache_manager",
            f"is true, must be false or left out: layers of {model.architecture} keep recurrent states, not blocks of "
            "tokens",
        )
    if model.full_heads is not None and config.disable_hybrid_kv_cache_manager:
        raise InvalidEngineConfig(
            "disable_hybrid_kv_cache_manager",
            f"is true, must be false or left out: layers of {model.architecture} with a window have other heads than "
            "those without, and cannot keep blocks with them",
        )
    for what, size in _divided_by_tensor_parallelism(model, config.enable_expert_parallel):
        if size % ranks:
            raise InvalidEngineConfig(
                "tensor_parallel_size", f"is {ranks}, which does not divide the model's {what} ({size})"
            )
    try:
        model.caches.of_rank(0, ranks)
    except UnevenHeads as error:
        # The single head of latents cannot cause this: ranks that share a head are allowed.
        raise InvalidEngineConfig("tensor_parallel_size", f"is {ranks}: {error}") from None
    if config.enable_expert_parallel:
        _check_experts(model, config)


def _divided_by_tensor_parallelism(model: ModelConfig, experts_spread: bool) -> Iterator[tuple[str, int]]:
    yield "num_attention_heads", model.num_heads
    if model.linear is not None:
        name = "linear_num_key_heads" if model.linear.gate_rank is None else "linear_num_heads"
        yield name, model.linear.num_key_heads
    if model.mamba is not None and model.has_states:
        yield "number of Mamba-2 heads", model.mamba.num_heads
    experts = model.moe
    if model.num_mlps:
        yield model.rules.mlp_width_key, model.intermediate_size
    if experts is not None and any(experts.sparse_layers):
        if not experts_spread:
            yield experts.intermediate_size_key, experts.intermediate_size
        if experts.shared_intermediate_size:
            yield "intermediate size of the shared experts", experts.shared_intermediate_size


def _check_experts(model: ModelConfig, config: EngineConfig) -> None:
    experts = model.moe
    if experts is None:
        raise InvalidEngineConfig("enable_expert_parallel", f"must be false: {model.architecture} has no experts")
    physical = experts.num_experts + config.num_redundant_experts
    if physical % config.world_size:
        with_copies = f" and {config.num_redundant_experts} copies" if config.num_redundant_experts else ""
        raise InvalidEngineConfig(
            "num_redundant_experts" if config.num_redundant_experts else "enable_expert_parallel",
            f"{experts.num_experts} experts{with_copies} do not divide over tensor_parallel_size x data_parallel_size "
            f"= {config.world_size} ranks; num_redundant_experts can fill them up",
        )
    if physical // config.world_size > experts.num_experts:
        most = (config.world_size - 1) * experts.num_experts
        raise InvalidEngineConfig(
            "num_redundant_experts",
            f"is {config.num_redundant_experts}: no rank holds an expert twice, so {config.world_size} ranks have room "
            f"for {most} copies of {experts.num_experts} experts",
        )

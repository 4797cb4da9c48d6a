"""Which layers are mixtures of experts and how tokens are routed, as a checkpoint describes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .errors import InvalidModelConfig, UnsupportedModel
from .keys import Keys


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Routed and shared experts of the layers that have them. The routing is `baton.kernels.moe.RoutingRule`'s."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one routed expert
    shared_intermediate_size: int  # of all shared experts together; 0: none
    scoring: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    sparse_layers: tuple[bool, ...]  # of each layer: whether its feed-forward layer is a mixture


def read_experts(architecture: str, keys: Keys, num_layers: int) -> ExpertsConfig | None:
    """The experts of a model; None for an architecture that has none. Raises `ModelError`."""
    if architecture not in _READERS:
        return None
    config = _READERS[architecture](keys, num_layers)
    group_size, rest = divmod(config.num_experts, config.num_groups)
    if rest or config.top_groups > config.num_groups or config.top_k > group_size * config.top_groups:
        raise InvalidModelConfig(
            f"config.json: {config.top_k} experts a token cannot be chosen from {config.num_experts} experts in "
            f"{config.top_groups} of {config.num_groups} equal groups"
        )
    return config


def _read_qwen3_moe(keys: Keys, num_layers: int) -> ExpertsConfig:
    step = keys.integer("decoder_sparse_step", 1)
    dense = keys.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise InvalidModelConfig(f"config.json: 'mlp_only_layers' must be a list of layers, not {dense!r}")
    return ExpertsConfig(
        num_experts=_num_experts(keys, ("num_experts", "num_local_experts"), 128),
        top_k=keys.integer("num_experts_per_tok", 8),
        intermediate_size=keys.integer("moe_intermediate_size", 768),
        shared_intermediate_size=0,
        renormalize=keys.flag("norm_topk_prob", False),
        sparse_layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )


def _read_deepseek_v2(keys: Keys, num_layers: int) -> ExpertsConfig:
    if keys.flag("norm_topk_prob", False):
        raise UnsupportedModel("config.json: norm_topk_prob is not supported for DeepSeek-V2, no checkpoint has it")
    scoring = keys.values.get("scoring_func") or "softmax"
    if scoring != "softmax":
        raise UnsupportedModel(f"config.json: scoring_func {scoring!r} is not supported for DeepSeek-V2, only softmax")
    method = keys.values.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"config.json: topk_method {method!r} is not supported for DeepSeek-V2")
    grouped = method == "group_limited_greedy"
    first, every = keys.optional_integer("first_k_dense_replace", 0) or 0, keys.integer("moe_layer_freq", 1)
    width = keys.integer("moe_intermediate_size", 1407)
    return ExpertsConfig(
        num_experts=_num_experts(keys, ("n_routed_experts", "num_experts", "num_local_experts"), 64),
        top_k=keys.integer("num_experts_per_tok"),
        intermediate_size=width,
        shared_intermediate_size=width * keys.integer("n_shared_experts", 2, maximum=1024),
        scale=keys.number("routed_scaling_factor", 1.0),
        num_groups=keys.integer("n_group", 1) if grouped else 1,
        top_groups=keys.integer("topk_group", 1) if grouped else 1,
        sparse_layers=tuple(layer >= first and layer % every == 0 for layer in range(num_layers)),
    )


def _num_experts(keys: Keys, names: tuple[str, ...], default: int) -> int:
    """Under whichever of its names a version of transformers has written it."""
    given = next((name for name in names if keys.values.get(name) is not None), names[0])
    return keys.integer(given, default)


_READERS: dict[str, Callable[[Keys, int], ExpertsConfig]] = {
    "Qwen3MoeForCausalLM": _read_qwen3_moe,
    "DeepseekV2ForCausalLM": _read_deepseek_v2,
}

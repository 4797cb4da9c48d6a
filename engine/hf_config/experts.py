"""Mixtures of experts as a checkpoint describes them: which layers, and how tokens are routed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from .errors import InvalidModelConfig, UnsupportedModel
from .keys import Keys


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Routed and shared experts of the layers that have them. The routing is `baton.kernels.moe.RoutingRule`'s."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one routed expert
    intermediate_size_key: str = "moe_intermediate_size"  # its name in config.json
    shared_intermediate_size: int  # of all shared experts together; 0: none
    scoring: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    router_bias: bool = False
    score_correction: bool = False  # whether a bias moves the choice of experts, and not their weights
    expert_biases: bool = False
    gate_slope: float = 1.0  # these three: `baton.kernels.moe.GatedActivation`'s
    gate_limit: float | None = None
    up_shift: float = 0.0
    stored: str = "each"  # in the checkpoint: see `layers.experts`
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # names of an expert's, stored by itself
    sparse_layers: tuple[bool, ...]  # of each layer: whether its feed-forward layer is a mixture


def read_experts(architecture: str, keys: Keys, num_layers: int, tensors: Collection[str] = ()) -> ExpertsConfig | None:
    """The experts of a model; None for an architecture that has none.

    `tensors` are the checkpoint's names, where there is one: they tell how experts are stored. Raises `ModelError`.
    """
    if architecture not in _READERS:
        return None
    config = _READERS[architecture](keys, num_layers)
    config = replace(config, stored=_stored(config.stored, tensors))
    group_size, rest = divmod(config.num_experts, config.num_groups)
    if rest or config.top_groups > config.num_groups or config.top_k > group_size * config.top_groups:
        raise InvalidModelConfig(
            f"config.json: num_experts_per_tok: {config.top_k} experts a token cannot be chosen from "
            f"{config.num_experts} experts in {config.top_groups} of {config.num_groups} equal groups (topk_group of "
            "n_group)"
        )
    return config


def _stored(default: str, tensors: Collection[str]) -> str:
    """`default` is how the architecture's authors store experts; transformers 5 can write all of a layer as one."""
    if any(name.endswith(".experts.gate_up_proj_blocks") for name in tensors):
        return "mxfp4"
    if default == "each" and any(name.endswith(".experts.gate_up_proj") for name in tensors):
        return "stacked"
    return default


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


def _read_mixtral(keys: Keys, num_layers: int) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=_num_experts(keys, ("num_local_experts", "num_experts"), 8),
        top_k=keys.integer("num_experts_per_tok", 2),
        intermediate_size=keys.integer("intermediate_size"),
        intermediate_size_key="intermediate_size",
        shared_intermediate_size=0,
        renormalize=True,
        projections=("w1", "w3", "w2"),
        sparse_layers=(True,) * num_layers,
    )


def _read_gpt_oss(keys: Keys, num_layers: int) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=_num_experts(keys, ("num_local_experts", "num_experts"), 128),
        top_k=keys.integer("num_experts_per_tok", 4),
        intermediate_size=keys.integer("intermediate_size"),
        intermediate_size_key="intermediate_size",
        shared_intermediate_size=0,
        renormalize=True,  # softmax over the chosen experts' logits: the same as over all, divided by the sum
        router_bias=True,
        expert_biases=True,
        gate_slope=keys.number("swiglu_alpha", 1.702),
        gate_limit=keys.number("swiglu_limit", 7.0),
        up_shift=1.0,
        stored="transposed",
        sparse_layers=(True,) * num_layers,
    )


def _read_deepseek_v3(keys: Keys, num_layers: int) -> ExpertsConfig:
    _require(keys, "scoring_func", "sigmoid", "DeepSeek-V3")
    _require(keys, "topk_method", "noaux_tc", "DeepSeek-V3")
    num_experts = _num_experts(keys, ("n_routed_experts", "num_local_experts", "num_experts"), 256)
    num_groups = keys.integer("n_group", 8)
    if num_groups > 1 and num_experts // num_groups < 2:
        raise InvalidModelConfig(
            f"config.json: groups are rated by their two best experts, but {num_experts} experts in {num_groups} "
            "groups (n_group) leave one for each"
        )
    width = keys.integer("moe_intermediate_size", 2048)
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=keys.integer("num_experts_per_tok", 8),
        intermediate_size=width,
        shared_intermediate_size=width * keys.integer("n_shared_experts", 1, maximum=1024),
        scoring="sigmoid",
        renormalize=keys.flag("norm_topk_prob", False),
        scale=keys.number("routed_scaling_factor", 2.5),
        num_groups=num_groups,
        top_groups=keys.integer("topk_group", 4),
        group_score="top2",
        score_correction=True,
        sparse_layers=_behind_dense_layers(keys, 3, num_layers),
    )


def _read_deepseek_v2(keys: Keys, num_layers: int) -> ExpertsConfig:
    if keys.flag("norm_topk_prob", False):
        raise UnsupportedModel("config.json: norm_topk_prob is not supported for DeepSeek-V2, no checkpoint has it")
    _require(keys, "scoring_func", "softmax", "DeepSeek-V2")
    method = keys.values.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"config.json: topk_method {method!r} is not supported for DeepSeek-V2")
    grouped = method == "group_limited_greedy"
    width = keys.integer("moe_intermediate_size", 1407)
    return ExpertsConfig(
        num_experts=_num_experts(keys, ("n_routed_experts", "num_experts", "num_local_experts"), 64),
        top_k=keys.integer("num_experts_per_tok"),
        intermediate_size=width,
        shared_intermediate_size=width * keys.integer("n_shared_experts", 2, maximum=1024),
        scale=keys.number("routed_scaling_factor", 1.0),
        num_groups=keys.integer("n_group", 1) if grouped else 1,
        top_groups=keys.integer("topk_group", 1) if grouped else 1,
        sparse_layers=_behind_dense_layers(keys, 0, num_layers),
    )


def _behind_dense_layers(keys: Keys, first: int, num_layers: int) -> tuple[bool, ...]:
    """DeepSeek's: mixtures from a layer on, `first` where the config says nothing, or every n-th from there on."""
    given = keys.optional_integer("first_k_dense_replace", first)
    every = keys.integer("moe_layer_freq", 1)
    return tuple(layer >= (given or 0) and layer % every == 0 for layer in range(num_layers))


def _require(keys: Keys, name: str, only: str, model: str) -> None:
    """Raises `UnsupportedModel` where the config says anything else."""
    given = keys.values.get(name) or only
    if given != only:
        raise UnsupportedModel(f"config.json: {name} {given!r} is not supported for {model}, only {only!r}")


def _num_experts(keys: Keys, names: tuple[str, ...], default: int) -> int:
    """Under whichever of its names a version of transformers has written it."""
    given = next((name for name in names if keys.values.get(name) is not None), names[0])
    return keys.integer(given, default)


_READERS: dict[str, Callable[[Keys, int], ExpertsConfig]] = {
    "Qwen3MoeForCausalLM": _read_qwen3_moe,
    "DeepseekV2ForCausalLM": _read_deepseek_v2,
    "DeepseekV3ForCausalLM": _read_deepseek_v3,
    "MixtralForCausalLM": _read_mixtral,
    "GptOssForCausalLM": _read_gpt_oss,
}

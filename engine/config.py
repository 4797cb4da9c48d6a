"""Engine arguments, under vLLM's names, so that arguments written for one serve the other.

A config is checked once and never rewritten. Values that depend on the checkpoint or the machine (the context length,
the number of KV blocks) are worked out by `engine.startup.load` and kept apart.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from . import vllm_compat
from .core.layout import BLOCK_SIZE
from .hf_config.model_config import KV_CACHE_DTYPES, LOAD_FORMATS
from .parallel.groups import ALL2ALL_BACKENDS, ExpertSpread

DTYPES = {
    "auto": None,  # the checkpoint's own
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}
DEVICES = ("auto", "cpu", "cuda")
_DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
_COUNTS = (  # of at least one, where they are given
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "tensor_parallel_size",
    "data_parallel_size",
    "eplb_step_interval",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "num_threads",
)


class InvalidEngineConfig(ValueError):
    """An engine argument is unknown or cannot be served. `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of one engine. Build it with `EngineConfig.from_args`, which checks names and types, too.

    Raises `InvalidEngineConfig`.
    """

    model: str  # a folder with config.json and safetensors
    tokenizer: str | None = None  # a folder; the model's own by default
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = (
        None  # tokens, prompt and output together; by default what the checkpoint was trained for
    )
    max_num_seqs: int | None = None  # None, and where the next one is: see `startup/step_sizes.py`
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = _DEFAULT_GPU_MEMORY_UTILIZATION  # of the whole device, all processes together
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int = BLOCK_SIZE
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool | None = None  # plan the next step before the results of this one are in; None: on a GPU
    enforce_eager: bool = False  # capture no steps; a CPU engine is eager in any case
    max_cudagraph_capture_size: int | None = None  # tokens of the largest captured mix of chunks; None: as above
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False  # whole experts on each rank, rather than a stretch of every one
    all2all_backend: str = "allgather_reducescatter"  # how tokens reach experts on other data-parallel ranks
    enable_eplb: bool = False  # count how often experts are used, and place them anew by that
    num_redundant_experts: int = 0  # copies of experts beyond the model's, for those that are used most
    eplb_step_interval: int = 3000  # steps from one placement to the next
    disable_custom_all_reduce: bool = False  # let NCCL do all that ranks sum and exchange, small things too
    distributed_timeout_seconds: float = 60.0  # how long a collective waits for a rank, but in captured steps
    device: str = "auto"
    num_threads: int | None = None  # of one engine on a CPU; by default OMP_NUM_THREADS, else every core it may run on
    seed: int = 0
    disable_log_stats: bool = False  # an engine logs none in any case: they are in `EngineCore.stats` and /metrics

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> EngineConfig:
        """The config that these arguments describe; None is as if left out.

        Raises `InvalidEngineConfig` for unknown names (and tells the nearest valid one), wrong types, and values that
        cannot be served. Arguments listed in `vllm_compat` are accepted where they change nothing.
        """
        for name, message in vllm_compat.refusals(args, vllm_compat.ENGINE).items():
            raise InvalidEngineConfig(name, message)
        args = {name: value for name, value in args.items() if name not in vllm_compat.ENGINE}
        for name in args:
            if name not in cls.__struct_fields__:
                near = difflib.get_close_matches(name, cls.__struct_fields__, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(cls.__struct_fields__)}"
                raise InvalidEngineConfig(name, f"is not an engine argument{hint}")
        args = {name: value for name, value in args.items() if value is not None}
        if "model" not in args:
            raise InvalidEngineConfig("model", "is required: a folder with config.json and safetensors")
        try:
            return msgspec.convert(args, cls)
        except msgspec.ValidationError as error:
            cause = error.__cause__
            if isinstance(cause, InvalidEngineConfig):
                raise cause from None
            message, _, path = str(error).partition(" - at `$.")
            message = message.replace(" | null`", "`")  # null is as if left out
            raise InvalidEngineConfig(path.rstrip("`") or "arguments", message) from None

    def __post_init__(self) -> None:
        self._require_choice("dtype", DTYPES)
        self._require_choice("kv_cache_dtype", KV_CACHE_DTYPES)
        self._require_choice("load_format", LOAD_FORMATS)
        self._require_choice("device", DEVICES)
        self._require_choice("all2all_backend", ALL2ALL_BACKENDS)
        self._require(
            "block_size",
            self.block_size == BLOCK_SIZE,
            f"must be {BLOCK_SIZE}: the layout of blocks is the wire format",
        )
        for name in _COUNTS:
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "must be at least 1")
        self._require(
            "max_model_len", self.max_model_len != 1, "must be at least 2: one token of prompt and one of output"
        )
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        self._require(
            "max_num_batched_tokens",
            tokens is None or seqs is None or tokens >= seqs,
            f"must be at least max_num_seqs ({seqs}): every running request needs a token a step",
        )
        self._require("distributed_timeout_seconds", self.distributed_timeout_seconds > 0, "must be above 0")
        self._require("max_cudagraph_capture_size", (self.max_cudagraph_capture_size or 0) >= 0, "must not be negative")
        self._require(
            "gpu_memory_utilization", 0.0 < self.gpu_memory_utilization <= 1.0, "must be above 0 and at most 1"
        )
        self._require("seed", 0 <= self.seed < 2**63, "must be from 0 to 2**63 - 1")
        self._require_what_this_version_serves()

    def _require_what_this_version_serves(self) -> None:
        self._require(
            "pipeline_parallel_size",
            self.pipeline_parallel_size == 1,
            "must be 1: layers are divided within (tensor_parallel_size), not dealt out",
        )
        self._require("num_redundant_experts", self.num_redundant_experts >= 0, "must not be negative")
        for name, default in (("enable_eplb", False), ("num_redundant_experts", 0)):
            self._require(
                name,
                self.enable_expert_parallel or getattr(self, name) == default,
                "needs enable_expert_parallel: without it every rank has a stretch of every expert",
            )
        self._require(
            "trust_remote_code", not self.trust_remote_code, "must be false: model code from checkpoints is never run"
        )
        self._require(
            "enable_chunked_prefill",
            self.enable_chunked_prefill,
            "must be true: the scheduler has one rule, and chunks are it",
        )

    @property
    def expert_spread(self) -> ExpertSpread | None:
        if not self.enable_expert_parallel:
            return None
        return ExpertSpread(self.num_redundant_experts, self.all2all_backend)

    @property
    def world_size(self) -> int:
        """Processes, each with a device, that are one group."""
        return self.tensor_parallel_size * self.data_parallel_size

    def _require_choice(self, field: str, allowed: Any, reason: str = "") -> None:
        value = getattr(self, field)
        self._require(
            field,
            value in allowed,
            f"must be one of {', '.join(allowed)}" + (f" ({reason})" if reason else ""),
        )

    def _require(self, field: str, condition: bool, message: str) -> None:
        if not condition:
            raise InvalidEngineConfig(field, f"is {getattr(self, field)!r}, {message}")

    def ignored_on(self, device: str) -> dict[str, str]:
        """Arguments that were given and change nothing on a "cpu" or "cuda", each with the reason: for a warning."""
        if device == "cuda":
            return {} if self.num_threads is None else {"num_threads": "it is for engines on a CPU"}
        reasons = {}
        if self.gpu_memory_utilization != _DEFAULT_GPU_MEMORY_UTILIZATION:
            reasons["gpu_memory_utilization"] = "a CPU engine's KV cache is sized by kv_cache_memory_bytes"
        if self.disable_custom_all_reduce:
            reasons["disable_custom_all_reduce"] = "it is for engines on GPUs"
        return reasons

    def depth_on(self, device: str) -> int:
        """Steps in flight. A CPU has computed a step when it has launched it, so a second one only adds latency."""
        ahead = device == "cuda" if self.async_scheduling is None else self.async_scheduling
        return 2 if ahead else 1

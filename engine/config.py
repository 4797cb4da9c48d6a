"""Engine arguments, under vLLM's names, so that arguments written for one work with the other.

A config is checked once and never rewritten. Values that depend on the checkpoint or the machine (the context length,
the number of KV blocks) are determined by `engine.startup.load` and kept separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from . import vllm_compat
from .core.layout import BLOCK_SIZE
from .core.speculation.config import SpeculativeConfig
from .hf_config.hub import is_hub_name
from .hf_config.model_config import KV_CACHE_DTYPES, LOAD_FORMATS
from .parallel.groups import ALL2ALL_BACKENDS, ExpertSpread
from .strict_model import (
    LONGEST_S,
    MOST_BYTES,
    MOST_RANKS,
    MOST_TOKENS,
    OneOf,
    StrictModel,
    problems_of,
)

DTYPES = {
    "auto": None,  # the checkpoint's own
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}
DEVICES = ("auto", "cpu", "cuda")
MOST_SEQS = 1 << 16  # in one step
MOST_STEP_TOKENS = 1 << 24
_DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
_ONE_VALUE = {  # arguments for which only one value is supported, and the reason
    "block_size": "the layout of blocks is the wire format",
    "enable_chunked_prefill": "the scheduler has one rule, and chunks are it",
    "pipeline_parallel_size": "each layer is divided over the ranks instead (tensor_parallel_size)",
    "trust_remote_code": "model code from checkpoints is never run",
}


class InvalidEngineConfig(ValueError):
    """An engine argument is unknown or cannot be served. `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class EngineArguments(StrictModel):
    """Arguments that an engine of any model takes. None means the default, as if left out.

    `EngineConfig` checks arguments that depend on each other, since it knows all of them. Arguments listed in
    `vllm_compat` are accepted and dropped if they change nothing.
    """

    model_config = ConfigDict(strict=True)

    dtype: Annotated[str, OneOf(DTYPES)] = "auto"
    kv_cache_dtype: Annotated[str, OneOf(KV_CACHE_DTYPES)] = "auto"
    load_format: Annotated[str, OneOf(LOAD_FORMATS)] = "auto"
    # Tokens of prompt and output together, at least one of each. By default the length the checkpoint was trained for.
    max_model_len: int | None = Field(None, ge=2, le=MOST_TOKENS)
    # None, also for the next one: see `startup/step_sizes.py`.
    max_num_seqs: int | None = Field(None, ge=1, le=MOST_SEQS)
    max_num_batched_tokens: int | None = Field(None, ge=1, le=MOST_STEP_TOKENS)
    gpu_memory_utilization: float = Field(_DEFAULT_GPU_MEMORY_UTILIZATION, gt=0, le=1)  # of the GPU, by all processes
    # Of a GPU that several engines share: this one takes `gpu_memory_utilization` of its share, whatever others take.
    gpu_share: float = Field(1.0, gt=0, le=1)
    kv_cache_memory_bytes: int | None = Field(None, ge=1, le=MOST_BYTES)
    num_gpu_blocks_override: int | None = Field(None, ge=1, le=10**8)
    block_size: int = BLOCK_SIZE
    disable_hybrid_kv_cache_manager: bool = False  # also keep KV that lies behind the windows of a model's layers
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool | None = None  # plan the next step before this one's results are in; None: only on a GPU
    enforce_eager: bool = False  # on a GPU: capture no steps
    # Tokens of the largest captured mix of chunks.
    max_cudagraph_capture_size: int | None = Field(None, ge=0, le=MOST_STEP_TOKENS)
    speculative_config: SpeculativeConfig | None = None  # guess tokens ahead, and check several of them in one step
    tensor_parallel_size: int = Field(1, ge=1, le=MOST_RANKS)
    pipeline_parallel_size: int = 1
    data_parallel_size: int = Field(1, ge=1, le=MOST_RANKS)
    enable_expert_parallel: bool = False  # whole experts on each rank, rather than a slice of every expert
    # How tokens reach experts on other data-parallel ranks.
    all2all_backend: Annotated[str, OneOf(ALL2ALL_BACKENDS)] = ALL2ALL_BACKENDS[0]
    enable_eplb: bool = False  # count how often experts are used, and place them accordingly
    num_redundant_experts: int = Field(0, ge=0, le=10**5)  # copies of the most used experts, beside the model's own
    eplb_step_interval: int = Field(3000, ge=1, le=10**9)  # steps from one placement to the next
    disable_custom_all_reduce: bool = False  # use NCCL for all sums and exchanges between ranks, also for small ones
    # The longest time from one decode step to the next, while another engine on the same GPU has prompts to compute.
    shared_gpu_decode_interval_ms: float = Field(30.0, ge=0, le=60_000)  # 0: steps never wait
    # A collective's wait for a rank, except in captured steps.
    distributed_timeout_seconds: float = Field(60.0, gt=0, le=LONGEST_S)
    device: Annotated[str, OneOf(DEVICES)] = "auto"
    # Of one engine on a CPU; by default OMP_NUM_THREADS, else all cores.
    num_threads: int | None = Field(None, ge=1, le=1024)
    seed: int = Field(0, ge=0, lt=2**63)
    trust_remote_code: bool = False
    disable_log_stats: bool = False  # no effect: engines do not log them; see `EngineCore.stats` and /metrics

    @model_validator(mode="before")
    @classmethod
    def _as_vllm_takes_them(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        cls.refuse(vllm_compat.refusals(data, vllm_compat.ENGINE))
        ours = {name: value for name, value in data.items() if name not in vllm_compat.ENGINE}
        for name, field in cls.model_fields.items():
            if name in ours and ours[name] is None and not field.is_required():
                ours[name] = field.default
        return ours

    @model_validator(mode="after")
    def _has_the_one_value(self) -> Self:
        given = {name: (getattr(self, name), type(self).model_fields[name].default) for name in _ONE_VALUE}
        self.refuse(
            {
                name: f"is {_spelled(value)}, must be {_spelled(allowed)}: {_ONE_VALUE[name]}"
                for name, (value, allowed) in given.items()
                if value != allowed
            }
        )
        return self


class EngineConfig(EngineArguments):
    """Arguments of one engine, with its model. Build it with `from_args`, whose errors are easier to read."""

    model: str  # a folder with config.json and safetensors, or a name on the Hub: see `hf_config/hub.py`
    revision: str | None = Field(None, min_length=1)  # of a name: a branch, a tag or a commit; by default `main`
    tokenizer: str | None = None  # a folder or a name; the model's own by default
    tokenizer_revision: str | None = Field(None, min_length=1)
    download_dir: str | None = Field(None, min_length=1)  # for fetched models; by default `huggingface_hub`'s cache
    skip_tokenizer_init: bool = False

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> EngineConfig:
        """Return the config that these arguments describe. None means the default, as if left out.

        Raises `InvalidEngineConfig` for unknown names (with the nearest valid one), wrong types, and values that cannot
        be served.
        """
        try:
            return cls.model_validate(dict(args))
        except ValidationError as error:
            where, what = next(problems_of(error))
            if where == "model" and args.get("model") is None:
                what = "is required: a folder with config.json and safetensors, or a name of the Hub"
            raise InvalidEngineConfig(where, what) from None

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        problems = {}
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:
            problems["max_num_batched_tokens"] = (
                f"is {tokens}, must be at least max_num_seqs ({seqs}): every running request needs a token a step"
            )
        for name in ("enable_eplb", "num_redundant_experts"):
            if (value := getattr(self, name)) and not self.enable_expert_parallel:
                problems[name] = (
                    f"is {_spelled(value)}, needs enable_expert_parallel: without it every rank has a slice of every"
                    " expert"
                )
        if self.download_dir is not None and not any(map(is_hub_name, self._models)):
            problems["download_dir"] = (
                f"is {self.download_dir!r}, and {self.model!r} is a folder, which is not downloaded: leave it out"
            )
        self.refuse(problems)
        return self

    @property
    def _models(self) -> list[str]:
        """The folders and names that the arguments have."""
        draft_model = None if self.speculative_config is None else self.speculative_config.model
        return [name for name in (self.model, self.tokenizer, draft_model) if name is not None]

    @property
    def expert_spread(self) -> ExpertSpread | None:
        if not self.enable_expert_parallel:
            return None
        return ExpertSpread(self.num_redundant_experts, self.all2all_backend)

    @property
    def guesses_on_device(self) -> bool:
        """True if a draft layer, head or model guesses tokens on the device."""
        return self.speculative_config is not None and self.speculative_config.guesses_on_device

    @property
    def kept_for_guesses(self) -> str:
        """The draft layer or model whose keys and values are kept beside the model's, for messages; empty: none."""
        speculation = self.speculative_config
        if speculation is None or not speculation.guesses_on_device:
            return ""
        return speculation.model or "its draft layer"

    @property
    def world_size(self) -> int:
        """The number of processes, each with a device, in the engine's group."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def kv_size_setting(self) -> str | None:
        """The name of the given argument that sizes the KV cache; None: it gets what the device has left."""
        given = (
            name for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes") if getattr(self, name) is not None
        )
        return next(given, None)

    def ignored_on(self, device: str) -> dict[str, str]:
        """Return the given arguments that have no effect on a "cpu" or "cuda", each with the reason, for a warning."""
        reasons, sized_by = {}, self.kv_size_setting
        if self.kv_cache_memory_bytes is not None and sized_by != "kv_cache_memory_bytes":
            reasons["kv_cache_memory_bytes"] = f"{sized_by} gives the number of KV blocks"
        defaults = {"gpu_memory_utilization": _DEFAULT_GPU_MEMORY_UTILIZATION, "gpu_share": 1.0}
        shares = [name for name, default in defaults.items() if getattr(self, name) != default]
        if device == "cuda":
            if self.num_threads is not None:
                reasons["num_threads"] = "it is for engines on a CPU"
            if sized_by is not None:
                reasons |= dict.fromkeys(shares, f"the KV cache is sized by {sized_by}")
            return reasons
        reasons |= dict.fromkeys(shares, "a CPU engine's KV cache is sized by kv_cache_memory_bytes")
        if self.disable_custom_all_reduce:
            reasons["disable_custom_all_reduce"] = "it is for engines on GPUs"
        return reasons

    def depth_on(self, device: str) -> int:
        """Return the number of steps in flight. The default on a CPU is one, since a launch there computes the step."""
        ahead = device == "cuda" if self.async_scheduling is None else self.async_scheduling
        return 2 if ahead else 1


def _spelled(value: bool | int) -> str:
    """Return a value as YAML spells it."""
    return str(value).lower()

"""Engine arguments, under vLLM's names, so that arguments written for one serve the other.

A config is checked once and never rewritten. Values that depend on the checkpoint or the machine (the context length,
the number of KV blocks) are worked out by `engine.startup.load` and kept apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from . import vllm_compat
from .core.layout import BLOCK_SIZE
from .core.speculation.config import SpeculativeConfig
from .hf_config.model_config import KV_CACHE_DTYPES, LOAD_FORMATS
from .parallel.groups import ALL2ALL_BACKENDS, ExpertSpread
from .strict_model import OneOf, StrictModel, problems_of

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
_ONE_VALUE = {  # arguments that have one value here, and why
    "block_size": "the layout of blocks is the wire format",
    "enable_chunked_prefill": "the scheduler has one rule, and chunks are it",
    "pipeline_parallel_size": "layers are divided within (tensor_parallel_size), not dealt out",
    "trust_remote_code": "model code from checkpoints is never run",
}


class InvalidEngineConfig(ValueError):
    """An engine argument is unknown or cannot be served. `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class EngineArguments(StrictModel):
    """Arguments that an engine of any model takes. None is as if left out: the default.

    Arguments that depend on each other are checked where all are known, by `EngineConfig`. Those listed in
    `vllm_compat` are taken, and dropped, where they change nothing.
    """

    model_config = ConfigDict(strict=True)

    dtype: Annotated[str, OneOf(DTYPES)] = "auto"
    kv_cache_dtype: Annotated[str, OneOf(KV_CACHE_DTYPES)] = "auto"
    load_format: Annotated[str, OneOf(LOAD_FORMATS)] = "auto"
    # Tokens, prompt and output together: at least one of each. By default what the checkpoint was trained for.
    max_model_len: int | None = Field(None, ge=2)
    max_num_seqs: int | None = Field(None, ge=1)  # None, and where the next one is: see `startup/step_sizes.py`
    max_num_batched_tokens: int | None = Field(None, ge=1)
    gpu_memory_utilization: float = Field(_DEFAULT_GPU_MEMORY_UTILIZATION, gt=0, le=1)  # of a device, all processes
    kv_cache_memory_bytes: int | None = Field(None, ge=1)
    num_gpu_blocks_override: int | None = Field(None, ge=1)
    block_size: int = BLOCK_SIZE
    disable_hybrid_kv_cache_manager: bool = False  # keep what lies behind the windows of a model's layers, too
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool | None = None  # plan the next step before the results of this one are in; None: on a GPU
    enforce_eager: bool = False  # capture no steps; a CPU engine is eager in any case
    max_cudagraph_capture_size: int | None = Field(None, ge=0)  # tokens of the largest captured mix of chunks
    speculative_config: SpeculativeConfig | None = None  # guess tokens ahead, and check several of them in one step
    tensor_parallel_size: int = Field(1, ge=1)
    pipeline_parallel_size: int = 1
    data_parallel_size: int = Field(1, ge=1)
    enable_expert_parallel: bool = False  # whole experts on each rank, rather than a stretch of every one
    # How tokens reach experts on other data-parallel ranks.
    all2all_backend: Annotated[str, OneOf(ALL2ALL_BACKENDS)] = ALL2ALL_BACKENDS[0]
    enable_eplb: bool = False  # count how often experts are used, and place them anew by that
    num_redundant_experts: int = Field(0, ge=0)  # copies of experts beyond the model's, for those that are used most
    eplb_step_interval: int = Field(3000, ge=1)  # steps from one placement to the next
    disable_custom_all_reduce: bool = False  # let NCCL do all that ranks sum and exchange, small things too
    distributed_timeout_seconds: float = Field(60.0, gt=0)  # a collective's wait for a rank, but in captured steps
    device: Annotated[str, OneOf(DEVICES)] = "auto"
    num_threads: int | None = Field(None, ge=1)  # of one engine on a CPU; by default OMP_NUM_THREADS, else every core
    seed: int = Field(0, ge=0, lt=2**63)
    trust_remote_code: bool = False
    disable_log_stats: bool = False  # an engine logs none in any case: they are in `EngineCore.stats` and /metrics

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
    """Arguments of one engine, with its model. Build it with `from_args`, which words errors better."""

    model: str  # a folder with config.json and safetensors, or a name of the Hub: see `hf_config/hub.py`
    revision: str | None = None  # of a name: a branch, a tag or a commit; by default `main`
    tokenizer: str | None = None  # a folder or a name; the model's own by default
    tokenizer_revision: str | None = None
    download_dir: str | None = None  # where names are kept; by default the cache of `huggingface_hub`
    skip_tokenizer_init: bool = False

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> EngineConfig:
        """Return the config that these arguments describe; None is as if left out.

        Raises `InvalidEngineConfig` for unknown names (and tells the nearest valid one), wrong types, and values that
        cannot be served.
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
                    f"is {_spelled(value)}, needs enable_expert_parallel: without it every rank has a stretch of every"
                    " expert"
                )
        self.refuse(problems)
        return self

    @property
    def expert_spread(self) -> ExpertSpread | None:
        if not self.enable_expert_parallel:
            return None
        return ExpertSpread(self.num_redundant_experts, self.all2all_backend)

    @property
    def guesses_on_device(self) -> bool:
        """True where the model's draft layer guesses tokens, or a second model."""
        return self.speculative_config is not None and self.speculative_config.guesses_on_device

    @property
    def kept_for_guesses(self) -> str:
        """The model or layer that guesses tokens, whose keys and values are kept beside the model's; empty: none."""
        speculation = self.speculative_config
        if speculation is None or not speculation.guesses_on_device:
            return ""
        return speculation.model or "its draft layer"

    @property
    def world_size(self) -> int:
        """Processes, each with a device, that are one group."""
        return self.tensor_parallel_size * self.data_parallel_size

    def ignored_on(self, device: str) -> dict[str, str]:
        """Return the given arguments that change nothing on a "cpu" or "cuda", each with the reason: for a warning."""
        if device == "cuda":
            return {} if self.num_threads is None else {"num_threads": "it is for engines on a CPU"}
        reasons = {}
        if self.gpu_memory_utilization != _DEFAULT_GPU_MEMORY_UTILIZATION:
            reasons["gpu_memory_utilization"] = "a CPU engine's KV cache is sized by kv_cache_memory_bytes"
        if self.disable_custom_all_reduce:
            reasons["disable_custom_all_reduce"] = "it is for engines on GPUs"
        return reasons

    def depth_on(self, device: str) -> int:
        """Return the steps in flight: on a CPU one, since it has computed a step when it has launched it."""
        ahead = device == "cuda" if self.async_scheduling is None else self.async_scheduling
        return 2 if ahead else 1


def _spelled(value: bool | int) -> str:
    """Spell a value as YAML does."""
    return str(value).lower()

"""vLLM's arguments that Baton has no use for: taken where they ask for nothing, refused with the reason where not.

A script written for vLLM spells out many of its defaults. None asks for nothing anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .core.sampling import MAX_LOGPROBS


@dataclass(frozen=True)
class ForeignArgument:
    reason: str  # why other values are refused
    asks_nothing: tuple[Any, ...] = ()  # beside None: values that change nothing, or are what Baton does in any case


_LOCAL = "a model is a local folder, and nothing is fetched"
_TEXT_ONLY = "models read text alone"
_NO_LORA = "adapters are not served: merge them into the weights"
_GENERATES = "models generate text, and do nothing else"
_FOLDERS_WORD = "config.json and generation_config.json say it: change them in a copy of the folder"
_IN_HOST_MEMORY = "blocks are kept in the host's memory by an application alone (kv_tiers)"

ENGINE = {
    "tokenizer_mode": ForeignArgument("a folder's tokenizer is read in one way", ("auto", "hf")),
    "revision": ForeignArgument(_LOCAL),
    "code_revision": ForeignArgument(_LOCAL),
    "tokenizer_revision": ForeignArgument(_LOCAL),
    "download_dir": ForeignArgument(_LOCAL),
    "hf_token": ForeignArgument(_LOCAL, (False,)),
    "hf_config_path": ForeignArgument(_FOLDERS_WORD),
    "hf_overrides": ForeignArgument(_FOLDERS_WORD, ({},)),
    "config_format": ForeignArgument("config.json is read, as Hugging Face writes it", ("auto", "hf")),
    "generation_config": ForeignArgument(
        "what the folder suggests counts where no sampling_params are given", ("auto",)
    ),
    "override_generation_config": ForeignArgument(_FOLDERS_WORD, ({},)),
    "model_loader_extra_config": ForeignArgument("safetensors are read in one way", ({},)),
    "model_impl": ForeignArgument("models are those of engine/models", ("auto",)),
    "quantization": ForeignArgument("weights are served as the checkpoint holds them, which its config.json says"),
    "calculate_kv_scales": ForeignArgument("scales of cached values come from the checkpoint", (False,)),
    "task": ForeignArgument(_GENERATES, ("auto", "generate")),
    "runner": ForeignArgument(_GENERATES, ("auto", "generate")),
    "convert": ForeignArgument(_GENERATES, ("auto", "none")),
    "pooler_config": ForeignArgument(_GENERATES),
    "override_pooler_config": ForeignArgument(_GENERATES),
    "chat_template": ForeignArgument("the folder's own is used: write chat_template.jinja there"),
    "allowed_local_media_path": ForeignArgument(_TEXT_ONLY, ("",)),
    "allowed_media_domains": ForeignArgument(_TEXT_ONLY, ([],)),
    "limit_mm_per_prompt": ForeignArgument(_TEXT_ONLY, ({},)),
    "mm_processor_kwargs": ForeignArgument(_TEXT_ONLY, ({},)),
    "enable_prompt_embeds": ForeignArgument("prompts are text or token ids", (False,)),
    "swap_space": ForeignArgument(
        f"preempted requests are computed again; {_IN_HOST_MEMORY}", (0, 4)
    ),  # 4: its default
    "preemption_mode": ForeignArgument("preempted requests are computed again", ("recompute",)),
    "cpu_offload_gb": ForeignArgument("weights stay on their device", (0,)),
    "kv_offloading_size": ForeignArgument(_IN_HOST_MEMORY, (0,)),
    "kv_transfer_config": ForeignArgument("an application's engines hand blocks over by themselves"),
    "enable_lora": ForeignArgument(_NO_LORA, (False,)),
    "enable_prompt_adapter": ForeignArgument(_NO_LORA, (False,)),
    "speculative_config": ForeignArgument("tokens are not guessed ahead"),
    "compilation_config": ForeignArgument(
        "steps are captured, not compiled: see enforce_eager and max_cudagraph_capture_size", ({}, 0)
    ),
    "max_seq_len_to_capture": ForeignArgument("decodes of every length are captured: see max_cudagraph_capture_size"),
    "disable_sliding_window": ForeignArgument("layers see what the checkpoint was trained for", (False,)),
    "disable_cascade_attn": ForeignArgument("attention does not cascade", (False, True)),
    "max_logprobs": ForeignArgument(f"{MAX_LOGPROBS} alternatives may be asked for", (MAX_LOGPROBS,)),
    "logprobs_mode": ForeignArgument("logprobs are those before temperature and penalties", ("raw_logprobs",)),
    "logits_processors": ForeignArgument("no code of callers runs within a step", ([],)),
    "structured_outputs_config": ForeignArgument(
        "xgrammar compiles grammars", ({}, {"backend": "auto"}, {"backend": "xgrammar"})
    ),
    "guided_decoding_backend": ForeignArgument("xgrammar compiles grammars", ("auto", "xgrammar")),
    "scheduling_policy": ForeignArgument("requests run by priority, then by arrival", ("fcfs", "priority")),
    "max_num_partial_prefills": ForeignArgument("chunks share what a step has room for", (1,)),
    "max_long_partial_prefills": ForeignArgument("chunks share what a step has room for", (1,)),
    "long_prefill_token_threshold": ForeignArgument("chunks share what a step has room for", (0,)),
    "num_scheduler_steps": ForeignArgument("every step is planned by itself", (1,)),
    "distributed_executor_backend": ForeignArgument(
        "ranks are processes on this machine; `baton serve` places them through Ray", ("mp", "uni")
    ),
    "decode_context_parallel_size": ForeignArgument("a sequence is not divided: see tensor_parallel_size", (1,)),
    "enable_sleep_mode": ForeignArgument("an engine keeps its memory until it ends", (False,)),
    "enable_return_routed_experts": ForeignArgument("outputs do not say which experts a token went to", (False,)),
    "use_tqdm_on_load": ForeignArgument("start-up is told in the log", (False,)),
}
_REQUEST = {
    "lora_request": ForeignArgument(_NO_LORA),
    "prompt_adapter_request": ForeignArgument(_NO_LORA),
    "guided_options_request": ForeignArgument("ask for structured_outputs in SamplingParams"),
    "priority": ForeignArgument("prompts of one call run in their order"),
    "tokenization_kwargs": ForeignArgument("prompts are encoded in one way: give prompt_token_ids", ({},)),
    "mm_processor_kwargs": ForeignArgument(_TEXT_ONLY, ({},)),
}
GENERATE = {
    **_REQUEST,
    "prompt_token_ids": ForeignArgument('give them as prompts: [{"prompt_token_ids": ids}]'),
}
CHAT = {
    **_REQUEST,
    "chat_template": ENGINE["chat_template"],
    "chat_template_content_format": ForeignArgument("contents reach the template as text", ("auto", "string")),
}


def refusals(given: Mapping[str, Any], known: Mapping[str, ForeignArgument]) -> dict[str, str]:
    """Of the arguments given, those in `known` that ask for something, each with what is wrong with it."""
    return {
        name: _refusal(value, known[name])
        for name, value in given.items()
        if name in known and not _asks_nothing(value, known[name])
    }


def _asks_nothing(value: Any, argument: ForeignArgument) -> bool:
    # Of equal types: True is no count of 1, and False no path.
    alike = (allowed for allowed in argument.asks_nothing if isinstance(allowed, bool) == isinstance(value, bool))
    return value is None or any(value == allowed for allowed in alike)


def _refusal(value: Any, argument: ForeignArgument) -> str:
    allowed = ", ".join(repr(allowed) for allowed in argument.asks_nothing)
    return f"is {value!r}: {argument.reason}; leave it out{f', or give {allowed}' if allowed else ''}"

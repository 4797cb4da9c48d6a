"""Arguments of vLLM and its server that Baton does not implement.

Scripts written for vLLM spell out many of its defaults. Such an argument is accepted if its value changes nothing, and
otherwise refused with the reason. None always changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .core.sampling import MAX_LOGPROBS


@dataclass(frozen=True)
class UnsupportedArgument:
    reason: str  # why other values are refused
    accepted: tuple[Any, ...] = ()  # beside None: values that change nothing, or describe what Baton does anyway

    @property
    def is_switch(self) -> bool:
        """True if the argument is true or false, so that an option of this name needs no value."""
        return bool(self.accepted) and all(isinstance(value, bool) for value in self.accepted)


_TOKEN = "the token is HF_TOKEN in the environment, or that of `hf auth login`"
_TEXT_ONLY = "models read only text"
_NO_LORA = "adapters are not served: merge them into the weights"
_GENERATES = "models generate text, and do nothing else"
_SET_IN_FOLDER = "config.json and generation_config.json set it: change them in a copy of the folder"
_IN_HOST_MEMORY = "blocks are kept in the host's memory by an application alone (kv_tiers)"

ENGINE = {
    "tokenizer_mode": UnsupportedArgument("a folder's tokenizer is read in one way", ("auto", "hf")),
    "code_revision": UnsupportedArgument("model code from checkpoints is never run"),
    "hf_token": UnsupportedArgument(_TOKEN, (True,)),
    "hf_config_path": UnsupportedArgument(_SET_IN_FOLDER),
    "hf_overrides": UnsupportedArgument(_SET_IN_FOLDER, ({},)),
    "config_format": UnsupportedArgument("config.json is read, as Hugging Face writes it", ("auto", "hf")),
    "generation_config": UnsupportedArgument(
        "the folder's generation_config.json applies if no sampling_params are given", ("auto",)
    ),
    "override_generation_config": UnsupportedArgument(_SET_IN_FOLDER, ({},)),
    "model_loader_extra_config": UnsupportedArgument("safetensors are read in one way", ({},)),
    "model_impl": UnsupportedArgument("models are those of engine/models", ("auto",)),
    "quantization": UnsupportedArgument("weights are served as the checkpoint holds them, which its config.json says"),
    "calculate_kv_scales": UnsupportedArgument("scales of cached values come from the checkpoint", (False,)),
    "task": UnsupportedArgument(_GENERATES, ("auto", "generate")),
    "runner": UnsupportedArgument(_GENERATES, ("auto", "generate")),
    "convert": UnsupportedArgument(_GENERATES, ("auto", "none")),
    "pooler_config": UnsupportedArgument(_GENERATES),
    "override_pooler_config": UnsupportedArgument(_GENERATES),
    "served_model_name": UnsupportedArgument("an engine has no name: --model-id of `baton serve` is the model's"),
    "chat_template": UnsupportedArgument("the folder's own is used: write chat_template.jinja there"),
    "chat_template_content_format": UnsupportedArgument("contents reach the template as text", ("auto", "string")),
    "enable_auto_tool_choice": UnsupportedArgument("a model whose chat template lists tools may call them", (True,)),
    "tool_call_parser": UnsupportedArgument("the form of a model's calls follows from its chat template"),
    "tool_parser_plugin": UnsupportedArgument("the form of a model's calls follows from its chat template", ("",)),
    "reasoning_parser": UnsupportedArgument("the form of a model's thoughts follows from its chat template", ("",)),
    "enable_reasoning": UnsupportedArgument("thoughts are always told apart from the answer", (True,)),
    "enable_prompt_tokens_details": UnsupportedArgument("answers always say how many tokens were cached", (True,)),
    "enable_server_load_tracking": UnsupportedArgument("the route /load always exists", (True,)),
    "enable_tokenizer_info_endpoint": UnsupportedArgument("the route /tokenizer_info always exists", (True,)),
    "enable_log_requests": UnsupportedArgument("only failed requests are logged", (False,)),
    "disable_log_requests": UnsupportedArgument("only failed requests are logged", (True,)),
    "allowed_local_media_path": UnsupportedArgument(_TEXT_ONLY, ("",)),
    "allowed_media_domains": UnsupportedArgument(_TEXT_ONLY, ([],)),
    "limit_mm_per_prompt": UnsupportedArgument(_TEXT_ONLY, ({},)),
    "mm_processor_kwargs": UnsupportedArgument(_TEXT_ONLY, ({},)),
    "enable_prompt_embeds": UnsupportedArgument("prompts are text or token ids", (False,)),
    "swap_space": UnsupportedArgument(
        f"preempted requests are computed again; {_IN_HOST_MEMORY}", (0, 4)
    ),  # 4: vLLM's default
    "preemption_mode": UnsupportedArgument("preempted requests are computed again", ("recompute",)),
    "cpu_offload_gb": UnsupportedArgument("weights stay on their device", (0,)),
    "kv_offloading_size": UnsupportedArgument(_IN_HOST_MEMORY, (0,)),
    "kv_transfer_config": UnsupportedArgument("an application's engines hand blocks over by themselves"),
    "enable_lora": UnsupportedArgument(_NO_LORA, (False,)),
    "enable_prompt_adapter": UnsupportedArgument(_NO_LORA, (False,)),
    "compilation_config": UnsupportedArgument(
        "steps are captured, not compiled: see enforce_eager and max_cudagraph_capture_size", ({}, 0)
    ),
    "max_seq_len_to_capture": UnsupportedArgument(
        "decodes of every length are captured: see max_cudagraph_capture_size"
    ),
    "disable_sliding_window": UnsupportedArgument("windows are those that the model was trained with", (False,)),
    "disable_cascade_attn": UnsupportedArgument("attention does not cascade", (False, True)),
    "max_logprobs": UnsupportedArgument(f"{MAX_LOGPROBS} alternatives may be asked for", (MAX_LOGPROBS,)),
    "logprobs_mode": UnsupportedArgument("logprobs are those before temperature and penalties", ("raw_logprobs",)),
    "logits_processors": UnsupportedArgument("no code of callers runs within a step", ([],)),
    "structured_outputs_config": UnsupportedArgument(
        "xgrammar compiles grammars", ({}, {"backend": "auto"}, {"backend": "xgrammar"})
    ),
    "guided_decoding_backend": UnsupportedArgument("xgrammar compiles grammars", ("auto", "xgrammar")),
    "scheduling_policy": UnsupportedArgument("requests run by priority, then by arrival", ("fcfs", "priority")),
    "max_num_partial_prefills": UnsupportedArgument("chunks share a step's token budget", (1,)),
    "max_long_partial_prefills": UnsupportedArgument("chunks share a step's token budget", (1,)),
    "long_prefill_token_threshold": UnsupportedArgument("chunks share a step's token budget", (0,)),
    "num_scheduler_steps": UnsupportedArgument("every step is planned by itself", (1,)),
    "distributed_executor_backend": UnsupportedArgument(
        "ranks are processes on this machine; `baton serve` places them through Ray", ("mp", "uni")
    ),
    "decode_context_parallel_size": UnsupportedArgument("a sequence is not divided: see tensor_parallel_size", (1,)),
    "enable_sleep_mode": UnsupportedArgument("an engine keeps its memory until it ends", (False,)),
    "enable_return_routed_experts": UnsupportedArgument("outputs do not say which experts a token went to", (False,)),
    "use_tqdm_on_load": UnsupportedArgument("the log shows the progress of start-up", (False,)),
}
_REQUEST = {
    "lora_request": UnsupportedArgument(_NO_LORA),
    "prompt_adapter_request": UnsupportedArgument(_NO_LORA),
    "guided_options_request": UnsupportedArgument("ask for structured_outputs in SamplingParams"),
    "tokenization_kwargs": UnsupportedArgument("prompts are encoded in one way: give prompt_token_ids", ({},)),
    "mm_processor_kwargs": UnsupportedArgument(_TEXT_ONLY, ({},)),
}
GENERATE = {
    **_REQUEST,
    "prompt_token_ids": UnsupportedArgument('give them as prompts: [{"prompt_token_ids": ids}]'),
}
CHAT = {
    **_REQUEST,
    "chat_template": ENGINE["chat_template"],
    "chat_template_content_format": ENGINE["chat_template_content_format"],
}


def refusals(given: Mapping[str, Any], known: Mapping[str, UnsupportedArgument]) -> dict[str, str]:
    """Return an error message for each argument in `given` that `known` lists, and whose value is not accepted."""
    return {
        name: _refusal(value, known[name])
        for name, value in given.items()
        if name in known and not _is_accepted(value, known[name])
    }


def _is_accepted(value: Any, argument: UnsupportedArgument) -> bool:
    # `True == 1` and `False == 0` in Python, but as arguments they are not the same.
    alike = (allowed for allowed in argument.accepted if isinstance(allowed, bool) == isinstance(value, bool))
    return value is None or any(value == allowed for allowed in alike)


def _refusal(value: Any, argument: UnsupportedArgument) -> str:
    allowed = ", ".join(repr(allowed) for allowed in argument.accepted)
    return f"is {value!r}: {argument.reason}; leave it out{f', or give {allowed}' if allowed else ''}"

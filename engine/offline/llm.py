"""The engine without a server: `LLM(model).generate(prompts, sampling_params)`. Names are vLLM's."""

from __future__ import annotations

import importlib
import itertools
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from .. import vllm_compat
from ..config import EngineConfig
from ..core.engine import EngineFailed
from ..core.messages import EngineError, EngineOutput, EngineRequest, ErrorKind
from ..core.sampling import SEED_BITS, InvalidSamplingParams, SamplingParams
from ..parallel.groups import GroupFailed
from ..parallel.member import ALONE_MEMBER
from ..startup.build import Engine, build_engine
from ..startup.model_config import fetch_models
from ..text import Chat, ChatPrompt, Tokenizer, bad_word_token_ids
from .arguments import (
    InvalidPrompt,
    Messages,
    Prompt,
    PromptReader,
    ReadPrompt,
    as_conversations,
    as_list,
    one_for_each,
    predictions_for_each,
    priorities_for_each,
    refuse_unsupported,
    require_flag,
    require_template_for_tools,
    require_text,
    require_tools,
    template_variables,
)
from .completion import Continuation, PromptsBar, RequestOutput, logprob_dict, prompts_bar
from .data_parallel import OfflineCore
from .local_members import LocalMembers
from .signals import DelayedSignals


class GenerationFailed(RuntimeError):
    """The engine could not serve prompt `request_id`; `kind` classifies the error."""

    def __init__(self, request_id: str, error: EngineError) -> None:
        super().__init__(f"request {request_id}: {error.text}")
        self.request_id = request_id
        self.kind = error.kind


class LLM:
    """A model in this process and others that it starts: `tensor_parallel_size` x `data_parallel_size` in all.

    `model` is a folder, or a name on the Hub such as `Qwen/Qwen3-0.6B`: files that the cache lacks are fetched first.

    `engine_args` are those of `EngineConfig` (`dtype`, `load_format`, `max_model_len`, `max_num_seqs`, `seed`,
    `revision`, ...). On a CPU it uses all cores of the process, unless `num_threads` or OMP_NUM_THREADS say less.

        llm = LLM("path/to/qwen3")
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
            print(output.outputs[0].text)

    Several threads may call it: their calls run one after the other. `close`, or the end of a `with` block or of this
    process, ends the other processes. Raises `InvalidEngineConfig`, `ModelError`, `TokenizerError`, or `GroupFailed` if
    one of the other processes fails.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, tokenizer: str | os.PathLike[str] | None = None, **engine_args: Any
    ) -> None:
        folders = {"model": model, "tokenizer": tokenizer}
        paths = {name: os.fspath(path) if isinstance(path, os.PathLike) else path for name, path in folders.items()}
        config = fetch_models(EngineConfig.from_args({**engine_args, **paths}))
        # Torch imports numpy, too, but takes any failure, even Ctrl-C, for its absence, and the script would go on.
        importlib.import_module("numpy")
        self.tokenizer = None if config.skip_tokenizer_init else Tokenizer.from_folder(config.tokenizer or config.model)
        self._prompts = PromptReader(self.tokenizer)
        with ExitStack() as stack:
            members = stack.enter_context(closing(LocalMembers(config))) if config.world_size > 1 else None
            self.engine: Engine = build_engine(config, member=ALONE_MEMBER if members is None else members.member)
            stack.callback(self.engine.close)
            core = self.engine.core
            self._core: OfflineCore = core if members is None else members.core_of_all_ranks(core)
            self._end = weakref.finalize(self, stack.pop_all().close)
        self._turn = threading.RLock()  # an engine's steps belong to one call at a time
        self._ids = itertools.count()
        self._random = random.Random(config.seed)  # draws missing seeds, so that two runs of a script are equal

    def close(self) -> None:
        """End the engine and its processes, after calls of other threads. Nothing can be generated afterwards."""
        with self._turn:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `InvalidPrompt` with `skip_tokenizer_init`."""
        return self._prompts.tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's defaults (generation_config.json), or those of `SamplingParams` where it has none."""
        generation = self.engine.model_config.generation
        suggested: dict[str, Any] = {
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k,
            "min_p": generation.min_p,
            "repetition_penalty": generation.repetition_penalty,
            "max_tokens": generation.max_new_tokens,
        }
        return SamplingParams(**{name: value for name, value in suggested.items() if value is not None})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Generate continuations of every prompt, in the prompts' order.

        A prompt is text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`, the last two with an
        optional `"cache_salt"`, and an optional `"prediction"`: the expected answer, as text or token ids, from which
        an engine with `speculative_config` takes drafts. One `SamplingParams` serves all prompts; a list has one for
        each. `use_tqdm` shows a progress bar. `priority` has a number for each prompt: lower is served sooner, whatever
        the order of the prompts. `vllm_arguments` are accepted if they change nothing: see `vllm_compat`.

        Raises `InvalidArgument`, `InvalidPrompt`, `InvalidSamplingParams` or `GenerationFailed`, and ends all requests
        of the call. Raises `EngineFailed` or `GroupFailed` if the engine can serve nothing any more, or was closed.
        """
        refuse_unsupported("generate", vllm_arguments, vllm_compat.GENERATE)
        return self._generate(as_list(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        special_tokens_in_messages: bool = False,
        prediction: str | Sequence[str | None] | None = None,
        priority: Sequence[int] | None = None,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, with the checkpoint's chat template.

        `tools` need a template that lists them. `chat_template_kwargs` are additional variables of the template, such
        as `enable_thinking`. Text in messages is never read as control tokens, even if it spells one, unless
        `special_tokens_in_messages` is set. `prediction` is the expected answer of one conversation, or a list with one
        for each, as in `generate`; `priority` has a number for each conversation.

        Raises `ChatTemplateError` (`InvalidMessages` for messages), and the exceptions of `generate`.
        """
        refuse_unsupported("chat", vllm_arguments, vllm_compat.CHAT)
        require_flag("add_generation_prompt", add_generation_prompt)
        require_flag("continue_final_message", continue_final_message)
        require_flag("special_tokens_in_messages", special_tokens_in_messages)
        require_tools(tools)
        variables = template_variables(chat_template_kwargs)
        tokenizer = self.get_tokenizer()
        require_template_for_tools(tools, tokenizer)
        prompts: list[Prompt] = []
        conversations = as_conversations(messages)
        predictions = predictions_for_each(prediction, len(conversations))
        for index, (conversation, expected) in enumerate(zip(conversations, predictions, strict=True)):
            chat = Chat(conversation, tools, add_generation_prompt, continue_final_message, variables)
            text = tokenizer.render_chat(chat)
            require_text(f"conversation {index}", text)
            prompt = ChatPrompt(text) if special_tokens_in_messages else tokenizer.guard_chat(text, chat)
            token_ids = tokenizer.encode_chat(prompt)
            prompts.append({"prompt": text, "prompt_token_ids": token_ids, "prediction": expected})
        return self._generate(prompts, sampling_params, use_tqdm, priority)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        require_flag("use_tqdm", use_tqdm, "; a bar of another kind is not drawn")
        default = self.get_default_sampling_params() if sampling_params is None else sampling_params
        with self._turn:
            if not self._end.alive:
                raise EngineFailed("the engine was closed", [])
            params = one_for_each(default, len(prompts))
            priorities = priorities_for_each(priority, len(prompts))
            requests = [
                self._request(index, self._prompts.read(index, prompt), each, first)
                for index, (prompt, each, first) in enumerate(zip(prompts, params, priorities, strict=True))
            ]
            with prompts_bar(len(requests)) if use_tqdm else nullcontext() as bar:
                self._run(requests, bar)
        return [request.output for request in requests]

    def _request(self, index: int, prompt: ReadPrompt, params: SamplingParams, priority: int) -> _Request:
        if params.stop and (self.tokenizer is None or not params.detokenize):
            raise InvalidSamplingParams("stop", "needs text: a tokenizer, and detokenize=True")
        if params.bad_words:
            words = bad_word_token_ids(self.get_tokenizer(), params.bad_words)
            params = msgspec.structs.replace(params, bad_words_token_ids=[*params.bad_words_token_ids, *words])
        return _Request(
            index=index,
            output=RequestOutput(str(next(self._ids)), prompt.text, prompt.token_ids),
            params=params,
            seed=self._random.getrandbits(SEED_BITS) if params.seed is None else params.seed,
            cache_salt=prompt.cache_salt,
            prediction=prompt.prediction,
            priority=priority,
            continuations=[Continuation(i, prompt.token_ids, params, self.tokenizer) for i in range(params.n)],
        )

    def _run(self, requests: Sequence[_Request], bar: PromptsBar | None) -> None:
        core = self._core
        running: dict[str, tuple[_Request, Continuation]] = {}
        try:
            for request in requests:
                for engine_request, continuation in request.engine_requests():
                    running[engine_request.request_id] = (request, continuation)
                    core.add(engine_request)
            while running:
                for step in self._step():
                    if step.request_id in running:  # it is not if a stop string ended it while a step was in flight
                        self._take(step, running, bar)
        except (EngineFailed, GroupFailed):
            raise  # no request is running any more
        except BaseException:
            if self._end.alive:
                for request_id in running:
                    core.abort(request_id)
                self._finish_steps()
            raise
        self._finish_steps()

    def _finish_steps(self) -> None:
        """Run the steps left after the last request: other ranks may wait for this one to step with them."""
        while self._core.has_work():
            self._step()

    def _step(self) -> list[EngineOutput]:
        """Run a whole step. If it is interrupted all the same, as by a second Ctrl-C, end the engine."""
        with DelayedSignals():
            try:
                outputs = self._core.step()
                if not outputs:
                    time.sleep(self._core.wait_s())
                return outputs
            except Exception:
                raise
            except BaseException:
                self.close()
                raise

    def _take(
        self, step: EngineOutput, running: dict[str, tuple[_Request, Continuation]], bar: PromptsBar | None
    ) -> None:
        request, continuation = running[step.request_id]
        if step.error is not None:
            if step.error.kind in (ErrorKind.INVALID, ErrorKind.TOO_LONG):
                raise InvalidPrompt(f"prompts[{request.index}]: {step.error.text}")
            raise GenerationFailed(request.output.request_id, step.error)
        if step.prompt_logprobs is not None:
            entries = [logprob_dict(entry, self.tokenizer) for entry in step.prompt_logprobs]
            request.output.prompt_logprobs = [None, *entries]
        request.output.num_cached_tokens = max(request.output.num_cached_tokens, step.num_cached_tokens)
        continuation.take(step)
        if continuation.output.finish_reason is not None:
            del running[step.request_id]
            if step.finish_reason is None:
                self._core.abort(step.request_id)  # a stop string ended it, of which the engine does not know
            request.finish(continuation)
        if bar is not None:
            bar.advance(len(step.token_ids), request.output)


@dataclass
class _Request:
    """A prompt that is being served: `n` engine requests, `n` continuations."""

    index: int  # of the prompt in its call
    output: RequestOutput
    params: SamplingParams
    seed: int
    cache_salt: str
    prediction: list[int]
    priority: int
    continuations: list[Continuation]

    def engine_requests(self) -> Iterator[tuple[EngineRequest, Continuation]]:
        many = len(self.continuations) > 1
        for i, continuation in enumerate(self.continuations):
            params = self.params if i == 0 else msgspec.structs.replace(self.params, prompt_logprobs=None)
            request = EngineRequest(
                request_id=f"{self.output.request_id}-{i}" if many else self.output.request_id,
                prompt_token_ids=self.output.prompt_token_ids,
                sampling=params,
                seed=(self.seed + i) % 2**SEED_BITS,
                arrival_s=time.time(),
                cache_salt=self.cache_salt,
                prediction_token_ids=self.prediction,
                priority=self.priority,
            )
            yield request, continuation

    def finish(self, continuation: Continuation) -> None:
        self.output.outputs.append(continuation.output)
        if len(self.output.outputs) == len(self.continuations):
            self.output.outputs.sort(key=lambda output: output.index)
            self.output.finished = True

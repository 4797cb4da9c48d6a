"""Prepares a validated request for engines: renders and tokenizes it, fills in defaults, and checks limits."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from baton.cluster.pluralize import pluralize
from baton.engine.core.sampling import InvalidSamplingParams, SamplingParams, StructuredOutputsParams
from baton.engine.text import RESERVED_VARIABLES, Chat, ChatPrompt, TextError, bad_word_token_ids

from ..errors import (
    ApiError,
    bad_request,
    context_length_exceeded,
    model_not_found,
    prediction_too_long,
    prompt_too_long,
)
from ..model import ServedModel
from ..routing.prefix_index import prefix_names
from ..settings import GatewaySettings
from .job import ParserOptions, PreparedRequest, UsageOptions
from .parsing import ApiFields, client_names
from .protocol import ChatInput, ChatRequest, CompletionRequest, GenerationRequest, Prediction, Prompt, StreamOptions
from .reasoning import effort_variables
from .structured_output import answer_constraint, reasoning_before, requested_constraint
from .tools import check_prompt_lists_tools, parser_config, tool_call_rules

T = TypeVar("T")
COMPLETION_MAX_TOKENS = 16  # OpenAI's default
INLINE_MESSAGES = 64  # longer chats are rendered in a body process: some templates take quadratic time
CHARS_A_TOKEN = 8  # more than most texts have
CUT_TOKENS = 64  # most tokens that cutting a text can add to its beginning
MAX_PROMPT_LOGPROBS = 2**18  # of all choices together: such a response takes about 20 MB
MAX_RETURNED_PROMPT_TOKENS = 2**20  # of all choices together: such ids take about 6 MB
COPIED = [  # fields that `SamplingParams` has under the same name
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "ignore_eos", "stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"),
    *("prompt_logprobs", "skip_special_tokens", "include_stop_str_in_output", "seed"),
]


class TooLargeForEventLoop(Exception):
    """Preparing the request would block the event loop, so a body process has to do it."""


class Preparer:
    """Prepares requests: in the event loop, where a thread tokenizes longer texts, or entirely in a body process."""

    def __init__(self, model: ServedModel, settings: GatewaySettings, *, in_event_loop: bool = True) -> None:
        self._model = model
        self.settings = settings
        self._in_event_loop = in_event_loop
        self._thread = ThreadPoolExecutor(1, "tokenizer")

    async def completion(self, request: CompletionRequest, key_salt: str = "") -> PreparedRequest:
        """Prepare a completion. Raises `ApiError` that names the field."""
        self._check_model(request.model)
        echo = bool(request.echo)
        if echo and request.prompt_logprobs is not None and request.prompt_logprobs != request.logprobs:
            raise bad_request("prompt_logprobs", "'prompt_logprobs' must equal 'logprobs' where 'echo' is set.")
        scores_only = echo and request.max_tokens == 0
        sampling = self._sampling(
            request,
            requested_constraint(request),
            {},
            max_tokens=1 if scores_only else request.max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if echo else request.prompt_logprobs,
        )
        prompts = await self._prompts(request)
        limits = [
            self._max_tokens(request.max_tokens, tokens, COMPLETION_MAX_TOKENS, "prompt", "max_tokens")
            for tokens in prompts
        ]
        prepared = self._prepared(request, key_salt, prompts, limits, sampling)
        prepared.client_field_names = client_names(request, sampling.structured_outputs, {})
        if not echo:
            return prepared
        decode = self._model.tokenizer.decode
        keeps_all = request.truncate_prompt_tokens is None
        prepared.echoes = [
            given if isinstance(given, str) and keeps_all else decode(tokens, request.skip_special_tokens)
            for given, tokens in zip(_separate(request.prompt), prompts, strict=True)
        ]
        prepared.scores_only = scores_only
        return prepared

    async def chat(self, request: ChatRequest, key_salt: str = "") -> PreparedRequest:
        """Prepare a chat completion. Raises `ApiError` that names the field."""
        self._check_model(request.model)
        if request.max_tokens is not None and request.max_completion_tokens is not None:
            raise bad_request("max_tokens", "Give 'max_completion_tokens' or its old name 'max_tokens', not both.")
        if request.top_logprobs and not request.logprobs:
            raise bad_request("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
        field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        asked = getattr(request, field)
        tokenizer = self._model.tokenizer
        form = tokenizer.tool_call_format
        calls = tool_call_rules(request, form)
        keeps_all = request.truncate_prompt_tokens is None
        prompt = await self._chat_prompt(request, keeps_all=keeps_all)
        constraint = requested_constraint(request)
        reasoning = reasoning_before(constraint, tokenizer.reasoning_after(prompt.of_template))
        names = {"logprobs": "top_logprobs", "max_tokens": field, "prompt": "messages"}
        sampling = self._sampling(
            request,
            answer_constraint(request, constraint, form, calls, reasoning),
            names,
            max_tokens=asked,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
        )
        self._check_choices(1, sampling.n)
        if keeps_all:
            await self._check_beginning("messages", prompt.text, request.add_special_tokens)
        tokens = self._last_tokens(request, await self._encode_chat(prompt, request.add_special_tokens), asked or 1)
        limit = self._max_tokens(asked, tokens, self._model.max_model_len, "messages", field)
        prepared = self._prepared(request, key_salt, [tokens], [limit], sampling)
        if request.prediction is not None:
            prepared.prediction = await self._prediction(request.prediction)
        prepared.parser_options = ParserOptions.of(parser_config(form, calls, reasoning))
        prepared.client_field_names = client_names(request, sampling.structured_outputs, names)
        return prepared

    async def converted_chat(self, request: ChatRequest, fields: ApiFields, key_salt: str = "") -> PreparedRequest:
        """Prepare a converted request of another API. Raises `ApiError` that uses that API's field names."""
        with fields.in_errors():
            prepared = await self.chat(request, key_salt)
        ours = {name: fields.name(theirs) for name, theirs in prepared.client_field_names.items()}
        prepared.client_field_names = {**fields.names, **ours}
        return prepared

    async def chat_tokens(self, request: ChatInput) -> list[int]:
        """Return the token ids of a chat's prompt."""
        return await self._encode_chat(await self._chat_prompt(request), request.add_special_tokens)

    async def _chat_prompt(self, request: ChatInput, *, keeps_all: bool = True) -> ChatPrompt:
        if self._in_event_loop and len(request.messages) > INLINE_MESSAGES:
            raise TooLargeForEventLoop
        self._check_length("messages", len(request.messages))  # each message is one token at least
        if request.continue_final_message and request.add_generation_prompt:
            message = "'continue_final_message' needs 'add_generation_prompt' to be false."
            raise bad_request("continue_final_message", message)
        messages = [message.for_template() for message in request.messages]
        variables = request.chat_template_kwargs or {}
        efforts = effort_variables(request.reasoning_effort, self._model.tokenizer.template_variables)
        if reserved := sorted(RESERVED_VARIABLES & variables.keys()):
            param = f"chat_template_kwargs.{reserved[0]}"
            raise bad_request(param, f"{reserved[0]!r} cannot be set in 'chat_template_kwargs'.")
        tokenizer = self._model.tokenizer
        check_prompt_lists_tools(request.usable_tools, tokenizer)
        chat = Chat(
            messages,
            tools=[tool.for_template() for tool in request.usable_tools] or None,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=efforts | variables,
        )
        try:
            text = tokenizer.render_chat(chat)
            if keeps_all:
                self._check_length("messages", tokenizer.least_tokens(text))
            if self.settings.special_tokens_in_messages:
                return ChatPrompt(text)
            return await self._compute(len(text), functools.partial(tokenizer.guard_chat, text, chat))
        except TextError as error:
            message = f"No prompt can be made of 'messages': {error}."
            raise bad_request("messages", message, detail=error.detail) from None

    async def _encode_chat(self, prompt: ChatPrompt, add_special_tokens: bool) -> list[int]:
        encode = functools.partial(self._model.tokenizer.encode_chat, prompt, add_special_tokens)
        return await self._compute(len(prompt.text), encode)

    async def _check_beginning(
        self,
        field: str,
        text: str,
        add_special_tokens: bool,
        too_long: Callable[[str, int, int], ApiError] = prompt_too_long,
    ) -> None:
        """Refuse a text much longer than the context if its beginning alone is already longer than the context."""
        head = text[: CHARS_A_TOKEN * self._model.max_model_len]
        if len(text) > 2 * len(head):
            num_tokens = len(await self.tokenize(head, add_special_tokens))
            if num_tokens > self._model.max_model_len + CUT_TOKENS:
                raise too_long(field, self._model.max_model_len, num_tokens - CUT_TOKENS)

    async def _prediction(self, prediction: Prediction) -> list[int]:
        """Return the tokens of a prediction, which may have as many as an answer can. It is no part of the prompt."""
        field, text, limit = "prediction.content", prediction.text, self._model.max_model_len
        num_tokens = self._model.tokenizer.least_tokens(text)
        if num_tokens <= limit:
            await self._check_beginning(field, text, False, prediction_too_long)
            tokens = await self.tokenize(text, add_special_tokens=False)
            if (num_tokens := len(tokens)) <= limit:
                return tokens
        raise prediction_too_long(field, limit, num_tokens)

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return a text's token ids."""
        encode = functools.partial(self._model.tokenizer.encode, text, add_special_tokens)
        return await self._compute(len(text), encode)

    async def _compute(self, num_chars: int, work: Callable[[], T]) -> T:
        """Run `work` on a text of `num_chars`; in a thread if the text is long."""
        if not self._in_event_loop or num_chars <= self.settings.inline_tokenize_chars:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def detokenize(self, tokens: list[int]) -> str:
        self._check_tokens("tokens", tokens)
        return self._model.tokenizer.decode(tokens, False)

    def _check_model(self, model: str) -> None:
        if model != self._model.model_id:
            raise model_not_found(model, self._model.model_id)

    async def _prompts(self, request: CompletionRequest) -> list[list[int]]:
        """Return `prompt`, in any of its four forms, as lists of token ids."""
        given = _separate(request.prompt)
        self._check_choices(len(given), request.n or 1)
        prompts = []
        for prompt in given:
            if isinstance(prompt, str):
                if request.truncate_prompt_tokens is None:
                    self._check_length("prompt", self._model.tokenizer.least_tokens(prompt))
                    await self._check_beginning("prompt", prompt, request.add_special_tokens)
                prompts.append(await self.tokenize(prompt, request.add_special_tokens))
            else:
                self._check_tokens("prompt", prompt)
                prompts.append(prompt)
            if not prompts[-1]:
                raise bad_request("prompt", "'prompt' must not be empty.")
        room = COMPLETION_MAX_TOKENS if request.max_tokens is None else max(1, request.max_tokens)
        return [self._last_tokens(request, tokens, room) for tokens in prompts]

    def _last_tokens(self, request: GenerationRequest, tokens: list[int], num_answer_tokens: int) -> list[int]:
        """Return the end of a prompt that `truncate_prompt_tokens` keeps; -1 leaves just enough room for the answer."""
        kept, limit = request.truncate_prompt_tokens, self._model.max_model_len
        if kept is None:
            return tokens
        if kept > limit:
            message = f"'truncate_prompt_tokens' must be at most {limit}, this model's context length, not {kept}."
            raise bad_request("truncate_prompt_tokens", message)
        return tokens[-max(1, limit - num_answer_tokens if kept == -1 else kept) :]

    def _check_choices(self, prompts: int, n: int) -> None:
        if prompts * n > self.settings.max_choices:
            message = (
                f"n={n} for {pluralize(prompts, 'prompt')} makes {prompts * n} choices, more than this server's "
                f"limit of {self.settings.max_choices}."
            )
            raise bad_request("n" if n > prompts else "prompt", message)

    def _check_length(self, field: str, least_tokens: int) -> None:
        """Refuse a text that cannot fit, before seconds are spent tokenizing it."""
        if least_tokens > self._model.max_model_len:
            raise prompt_too_long(field, self._model.max_model_len, least_tokens)

    def _check_tokens(self, field: str, tokens: Sequence[int]) -> None:
        size = self._model.vocab_size
        if tokens and (min(tokens) < 0 or max(tokens) >= size):
            wrong = next(token for token in tokens if not 0 <= token < size)
            raise bad_request(field, f"{field!r}: token id {wrong} is not in the vocabulary of {size} tokens.")

    def _sampling(
        self,
        request: GenerationRequest,
        constraint: StructuredOutputsParams | None,
        names: Mapping[str, str],
        **computed: int | None,
    ) -> SamplingParams:
        """Return the checkpoint's default parameters, overridden by the client's fields.

        The answer must match `constraint`; `names` maps Baton's field names to the client's where they differ.
        """
        if request.stream and request.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs", "'prompt_logprobs' cannot be streamed. Set 'stream' to false.")
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options", "'stream_options' needs 'stream' to be true.")
        given_fields = {name: value for name in COPIED if (value := getattr(request, name)) is not None}
        values: dict[str, Any] = {
            **self._model.generation_defaults,
            **given_fields,
            **computed,
            "structured_outputs": constraint,
        }
        if request.bad_words:
            values["bad_words_token_ids"] = bad_word_token_ids(self._model.tokenizer, request.bad_words)
        try:
            sampling = SamplingParams(**values)
            sampling.check_vocabulary(self._model.vocab_size)
        except InvalidSamplingParams as error:
            refusal = bad_request(error.field, f"{error.field!r} {error.message}.")
            refusal.rename({"bad_words_token_ids": "bad_words", **names})
            raise refusal from None
        return sampling

    def _max_tokens(self, asked: int | None, tokens: Sequence[int], default: int, prompt: str, field: str) -> int:
        """Return how many tokens may follow this prompt, at most."""
        limit, room = self._model.max_model_len, self._model.max_model_len - len(tokens)
        if room < 1:
            raise context_length_exceeded(prompt, limit, len(tokens), None)
        if asked is not None and asked > room:
            raise context_length_exceeded(field, limit, len(tokens), asked)
        return min(default, room) if asked is None else max(1, asked)  # 0 occurs only with `scores_only`

    def _prepared(
        self,
        request: GenerationRequest,
        key_salt: str,
        prompts: list[list[int]],
        limits: list[int],
        sampling: SamplingParams,
    ) -> PreparedRequest:
        """Return the prepared request. `key_salt` separates the cached prefixes of API keys; "" shares them."""
        _check_prompt_logprobs(sampling, prompts)
        if request.return_token_ids:
            _check_returned_tokens(sampling, prompts)
        for limit in limits:
            if sampling.min_tokens > limit:
                raise bad_request("min_tokens", f"'min_tokens' must not exceed the {limit} tokens that may follow.")
        salt = request.cache_salt or ""
        salt = f"{key_salt}/{salt}" if key_salt else salt
        options = request.stream_options or StreamOptions()
        return PreparedRequest(
            prompts=prompts,
            block_names=[prefix_names(prompt, sampling, salt) for prompt in prompts],
            limits=limits,
            sampling=sampling,
            priority=request.priority,
            cache_salt=salt,
            streams=bool(request.stream),
            usage=UsageOptions(at_end=options.include_usage, in_each_chunk=options.continuous_usage_stats),
            is_resumable=bool(request.stream and options.resumable),
            tells_timeline=request.baton_timeline,
            shows_prompt_logprobs=request.prompt_logprobs is not None,
            returns_token_ids=bool(request.return_token_ids),
        )


def _check_prompt_logprobs(sampling: SamplingParams, prompts: Sequence[Sequence[int]]) -> None:
    """Limit the prompt log probabilities of all choices together, since a response is held until it is sent."""
    if sampling.prompt_logprobs is None:
        return
    count = sum(map(len, prompts)) * sampling.n * (sampling.prompt_logprobs + 1)
    if count > MAX_PROMPT_LOGPROBS:
        message = (
            f"The log probabilities of the prompts are {count} in all choices, more than {MAX_PROMPT_LOGPROBS}. "
            "Ask for fewer of them, or send the prompts in several requests."
        )
        raise bad_request("prompt", message, "too_many_logprobs")


def _check_returned_tokens(sampling: SamplingParams, prompts: Sequence[Sequence[int]]) -> None:
    """Limit the token ids of prompts, which are repeated in every choice."""
    if (count := sum(map(len, prompts)) * sampling.n) > MAX_RETURNED_PROMPT_TOKENS:
        message = (
            f"The prompts of all choices have {count} token ids to return, more than {MAX_RETURNED_PROMPT_TOKENS}. "
            "Leave 'return_token_ids' out, or send the prompts in several requests."
        )
        raise bad_request("return_token_ids", message, "too_many_values")


def _separate(prompt: Prompt) -> list[str | list[int]]:
    """Return the prompts of a completions request, which has one or several, as texts or as token ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):  # validation ensures that all items are of one type
        return [prompt]
    return prompt  # type: ignore[return-value]

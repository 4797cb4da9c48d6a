"""The options of `baton bench serve`, under the names of `vllm bench serve` where it has them.

Command lines of `vllm bench serve` work unchanged; those of its options that cannot work are refused with the reason.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cluster.cli.cli_common import DEFAULT_URL, ApiKey, Url

METRICS = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")  # metrics with one value a request, for which a goal can be given
DEFAULT_OUTPUT_LEN = 32
CUSTOM_OUTPUT_LEN = 256  # for lines of a custom data set without `output_tokens`
PREFIX_REPETITION_OUTPUT_LEN = 128
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
CHAT_ENDING, ENDING = "/chat/completions", "/completions"  # of routes that follow OpenAI's API
LISTS = ("--header", "--metadata", "--goodput")  # options that take several values in vLLM
ALWAYS = ("--skip-chat-template", "--skip-tokenizer-init")  # accepted and ignored: Baton always does this
REFUSED = {  # vLLM's options that cannot work: option -> reason, and what to do instead
    "--enable-multimodal-chat": "requests are texts alone",
    "--lora-assignment": "adapters are not served",
    "--lora-modules": "adapters are not served",
    "--no-reranker": "nothing is ranked",
    "--no-stream": "data sets are read from files: name one with --dataset-path",
    "--plot-dataset-stats": "--report writes a page with plots",
    "--plot-timeline": "--report writes a page with plots",
    "--probe-request-rate": "a second `baton bench serve --request-rate` beside this one measures the same",
    "--random-batch-size": "each request has one prompt",
    "--timeline-itl-thresholds": "--report writes a page with plots",
    "--tokenizer-mode": "the tokenizer is the server's, or the tokenizer.json that --tokenizer names",
    "--trust-remote-code": "no code of checkpoints is run: tokenizers are read from tokenizer.json",
    "--use-beam-search": "the server has no beam search",
}


class InvalidLoad(ValueError):
    """Options that contradict each other, or an invalid value."""


class LoadBackend(enum.StrEnum):
    """The API to which requests are sent."""

    OPENAI = "openai"  # /v1/completions
    VLLM = "vllm"  # the same, under vLLM's name
    OPENAI_CHAT = "openai-chat"  # /v1/chat/completions

    @property
    def route(self) -> str:
        return "/v1/chat/completions" if self is LoadBackend.OPENAI_CHAT else "/v1/completions"


class DataSet(enum.StrEnum):
    RANDOM = "random"
    PREFIX_REPETITION = "prefix_repetition"
    SHAREGPT = "sharegpt"
    CUSTOM = "custom"
    TIMED_TRACE = "timed_trace"


class RampUp(enum.StrEnum):
    LINEAR = "linear"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, kw_only=True)
class ServeLoad:
    """The options of `baton bench serve`: which requests are sent, when, and what is reported."""

    url: Url = DEFAULT_URL
    host: Annotated[
        str | None, typer.Option(help=f"Host of the server, instead of --url.  [default: {DEFAULT_HOST}]")
    ] = None
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help=f"Port of the server, instead of --url.  [default: {DEFAULT_PORT}]"),
    ] = None
    backend: Annotated[
        LoadBackend, typer.Option("--backend", "--endpoint-type", help="API to use: completions or chat completions.")
    ] = LoadBackend.OPENAI
    endpoint: Annotated[str | None, typer.Option(help="Path of the endpoint.  [default: the backend's]")] = None
    model: Annotated[str | None, typer.Option(help="Model name. Default: the server's only model.")] = None
    served_model_name: Annotated[
        str | None, typer.Option(help="Model name sent to the server, if it differs from --model.")
    ] = None
    num_prompts: Annotated[int, typer.Option(min=1, max=10**6, help="Number of requests in each run.")] = 100
    dataset_name: Annotated[DataSet, typer.Option(help="Data set that prompts come from.")] = DataSet.RANDOM
    dataset_path: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File of the data set, unless it is generated.")
    ] = None
    input_len: Annotated[
        int, typer.Option("--input-len", "--random-input-len", min=1, help="Tokens per random prompt.")
    ] = 128
    output_len: Annotated[
        int | None,
        typer.Option(
            "--output-len",
            "--random-output-len",
            "--sharegpt-output-len",
            "--custom-output-len",
            "--prefix-repetition-output-len",
            min=1,
            help=f"Output tokens per request.  [default: {DEFAULT_OUTPUT_LEN} for random, "
            f"{PREFIX_REPETITION_OUTPUT_LEN} for prefix_repetition, else what the file says]",
        ),
    ] = None
    random_range_ratio: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Spread of random lengths: 0.5 is from -50% to +50%.")
    ] = 0.0
    random_prefix_len: Annotated[int, typer.Option(min=0, help="Tokens of a prefix shared by all random prompts.")] = 0
    prefix_repetition_prefix_len: Annotated[int, typer.Option(min=1, help="Tokens per repeated prefix.")] = 256
    prefix_repetition_suffix_len: Annotated[
        int, typer.Option(min=1, help="Tokens after the prefix, different in each prompt.")
    ] = 256
    prefix_repetition_num_prefixes: Annotated[int, typer.Option(min=1, help="Number of different prefixes.")] = 10
    no_oversample: Annotated[
        bool, typer.Option("--no-oversample", help="Do not repeat requests if the file has fewer than --num-prompts.")
    ] = False
    disable_shuffle: Annotated[
        bool, typer.Option("--disable-shuffle", help="Send requests in the order of the file.")
    ] = False
    self_timed: Annotated[
        bool | None, typer.Option(help="Send requests at the trace's times, rather than at --request-rate.")
    ] = None
    trace_speed: Annotated[
        float, typer.Option(min=0.001, help="Speed-up of the trace: 2 sends it in half the time.")
    ] = 1.0
    request_rate: Annotated[float, typer.Option(min=0.0, help="Requests per second; 0 or inf sends all at once.")] = 0.0
    burstiness: Annotated[
        float,
        typer.Option(min=0.01, help="Shape of the times between requests: 1 is Poisson, less is bursty, inf is even."),
    ] = 1.0
    ramp_up_strategy: Annotated[
        RampUp | None, typer.Option(help="How the rate rises from --ramp-up-start-rps to --ramp-up-end-rps.")
    ] = None
    ramp_up_start_rps: Annotated[float | None, typer.Option(min=0.01)] = None
    ramp_up_end_rps: Annotated[float | None, typer.Option(min=0.01)] = None
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Maximum number of concurrent requests.")] = None
    sweep_concurrency: Annotated[
        str | None, typer.Option(help="Run once with each of these --max-concurrency: 1,4,16,64.")
    ] = None
    sweep_rate: Annotated[str | None, typer.Option(help="Run once with each of these --request-rate: 1,2,4,inf.")] = (
        None
    )
    num_warmups: Annotated[int, typer.Option(min=0)] = 1
    seed: int = 0
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None
    top_k: int | None = None
    min_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: Annotated[int | None, typer.Option(min=0, help="Log probabilities to request per token.")] = None
    ignore_eos: Annotated[bool, typer.Option(help="Generate past the end-of-sequence token.")] = True
    extra_body: Annotated[str | None, typer.Option(help="Additional fields for each request, as a JSON object.")] = None
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help="Chat template variables, as JSON. Needs --backend openai-chat.")
    ] = None
    header: Annotated[list[str] | None, typer.Option(help="Header of each request, KEY=VALUE. May be repeated.")] = None
    tokenizer: Annotated[
        str | None, typer.Option(help="Model name or folder to load the tokenizer from, for servers without /tokenize.")
    ] = None
    percentile_metrics: Annotated[str, typer.Option(help="Metrics to report percentiles of.")] = ",".join(METRICS)
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles to report.")] = "50,90,95,99"
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Goal in ms: ttft:500, tpot:50 or e2el:5000. Requests must meet all. May be repeated."),
    ] = None
    label: Annotated[str | None, typer.Option(help="Name of this run in the report.")] = None
    metadata: Annotated[
        list[str] | None, typer.Option(help="Metadata to store with the result, KEY=VALUE. May be repeated.")
    ] = None
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write the result to a file named after the run.")
    ] = False
    append_result: Annotated[
        bool, typer.Option("--append-result", help="Append the result to the result file, as one line of JSON.")
    ] = False
    result_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder of the result file.  [default: the current one]")
    ] = None
    result_filename: Annotated[str | None, typer.Option(help="Name of the result file.")] = None
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="Also store each request's times in the result file.")
    ] = False
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile the engines during each run; --api-key must be an admin's.")
    ] = False
    ready_check_timeout_sec: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the server to become ready.")
    ] = 0.0
    request_id_prefix: Annotated[
        str | None, typer.Option(help="Send `x-request-id`: this prefix and the request's number in the run.")
    ] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not verify the server's TLS certificate.")] = False
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm", help="Do not show a progress bar.")] = False
    timeline: Annotated[bool, typer.Option("--timeline", help="Show where requests spent their time, too.")] = False
    api_key: ApiKey = None

    def at(self, route: str) -> str:
        """Return the URL of a route. The path of `url` is a prefix of all routes; a trailing `/v1` is ignored."""
        return self.server.rstrip("/").removesuffix("/v1") + route

    @property
    def server(self) -> str:
        """The URL of the server."""
        if self.host is None and self.port is None:
            return self.url
        host = self.host or DEFAULT_HOST
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port or DEFAULT_PORT}"

    @property
    def route(self) -> str:
        """The route that requests are sent to."""
        return self.endpoint or self.backend.route

    def check(self) -> None:
        """Raise `InvalidLoad` for options that contradict each other, and for invalid values."""
        _ = self.percentiles, self.percentile_figures, self.goals_ms, self.extra_headers, self.facts
        _ = self.extra_fields, self.template_variables
        self._check_server()
        if (self.dataset_name in (DataSet.RANDOM, DataSet.PREFIX_REPETITION)) != (self.dataset_path is None):
            reason = "needs --dataset-path" if self.dataset_path is None else "has no --dataset-path: name the data set"
            raise InvalidLoad(f"--dataset-name {self.dataset_name} {reason}")
        if self.sweep_concurrency is not None and self.sweep_rate is not None:
            raise InvalidLoad("--sweep-concurrency and --sweep-rate cannot be combined: give one of them")
        if (self.ramp_up_strategy is None) != (self.ramp_up_start_rps is None) or (
            (self.ramp_up_start_rps is None) != (self.ramp_up_end_rps is None)
        ):
            raise InvalidLoad("--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together: give all")
        paces = {
            "--request-rate": bool(self.request_rate),
            "--ramp-up-strategy": self.ramp_up_strategy is not None,
            "--sweep-rate": self.sweep_rate is not None,
        }
        given = [name for name, is_given in paces.items() if is_given]
        if self.self_timed is not None and self.dataset_name is not DataSet.TIMED_TRACE:
            raise InvalidLoad("--self-timed and --no-self-timed are for --dataset-name timed_trace")
        if self.is_self_timed and given:
            hint = f"leave {given[0]} out, change --trace-speed, or give --no-self-timed"
            raise InvalidLoad(f"a trace says when its requests come: {hint}")
        if len(given) > 1:
            raise InvalidLoad(f"{' and '.join(given)} cannot be combined: give one of them")
        self.levels()

    def _check_server(self) -> None:
        if self.url != DEFAULT_URL and (self.host is not None or self.port is not None):
            raise InvalidLoad("--url says where the server is: leave --host and --port out")
        if self.endpoint is None:
            return
        if not self.endpoint.startswith("/"):
            raise InvalidLoad(f"--endpoint {self.endpoint}: give a path, as {self.backend.route}")
        asks_chats = self.backend is LoadBackend.OPENAI_CHAT
        if self.endpoint.endswith(ENDING) and self.endpoint.endswith(CHAT_ENDING) != asks_chats:
            backends = (LoadBackend.OPENAI_CHAT, LoadBackend.OPENAI)
            raise InvalidLoad(f"--endpoint {self.endpoint} needs --backend {backends[asks_chats]}")

    def levels(self) -> list[ServeLoad]:
        """Return the runs of a sweep; this one alone if nothing is swept. Raises `InvalidLoad`."""
        if self.sweep_concurrency is not None:
            levels = map(int, _numbers("--sweep-concurrency", self.sweep_concurrency, least=1, whole=True))
            return [dataclasses.replace(self, max_concurrency=level, sweep_concurrency=None) for level in levels]
        if self.sweep_rate is not None:
            rates = _numbers("--sweep-rate", self.sweep_rate, least=0)
            return [dataclasses.replace(self, request_rate=rate, sweep_rate=None) for rate in rates]
        return [self]

    @property
    def sweeps(self) -> str | None:
        """The option that changes from run to run of a sweep; None without a sweep."""
        if self.sweep_concurrency is not None:
            return "max_concurrency"
        return None if self.sweep_rate is None else "request_rate"

    @property
    def rate(self) -> float | None:
        """Requests a second; None sends all at once."""
        return self.request_rate if 0 < self.request_rate < math.inf else None

    @property
    def percentiles(self) -> list[float]:
        return _numbers("--metric-percentiles", self.metric_percentiles, least=0, most=100)

    @property
    def percentile_figures(self) -> list[str]:
        """The metrics whose percentiles are reported."""
        names = [name.strip() for name in self.percentile_metrics.split(",") if name.strip()]
        if unknown := [name for name in names if name not in METRICS]:
            raise InvalidLoad(f"--percentile-metrics {unknown[0]}: give {', '.join(METRICS)}, or some of them")
        return names

    @property
    def is_self_timed(self) -> bool:
        """True if requests are sent at the times of a trace."""
        return self.dataset_name is DataSet.TIMED_TRACE and self.self_timed is not False

    @property
    def goals_ms(self) -> dict[str, float]:
        """The goals of each request in ms, by metric."""
        goals = {}
        for given in self.goodput or ():
            name, _, value = given.partition(":")
            if name not in GOALS:
                names = f"{', '.join(GOALS[:-1])} or {GOALS[-1]}"
                raise InvalidLoad(f"--goodput {given}: give {names} with milliseconds, as ttft:500")
            goals[name] = _numbers("--goodput", value, least=0)[0]
        return goals

    @property
    def extra_fields(self) -> dict[str, Any]:
        return _object("--extra-body", self.extra_body)

    @property
    def template_variables(self) -> dict[str, Any]:
        variables = _object("--chat-template-kwargs", self.chat_template_kwargs)
        if variables and self.backend is not LoadBackend.OPENAI_CHAT:
            raise InvalidLoad(f"--chat-template-kwargs needs --backend {LoadBackend.OPENAI_CHAT}")
        return variables

    @property
    def extra_headers(self) -> dict[str, str]:
        return _pairs("--header", self.header)

    @property
    def facts(self) -> dict[str, str]:
        return _pairs("--metadata", self.metadata)


def as_options(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of vLLM's command line, with `--goodput ttft:500 tpot:50` split into one option for each value.

    Raises `InvalidLoad` for an option that cannot work, and for a list option without a value.
    """
    of_list = ""  # the list option to which the next words may belong
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        name, has_value, _ = word.partition("=")
        if name in REFUSED:
            raise InvalidLoad(f"{name}: {REFUSED[name]}")
        if not word.startswith("--"):
            yield from (of_list, word) if of_list else (word,)
            continue
        of_list = name if name in LISTS and not has_value else ""
        if of_list and following.startswith("--"):
            raise InvalidLoad(f"{name} needs a value")
        if not of_list and name not in ALWAYS:
            yield word


def _numbers(option: str, given: str, *, least: float, most: float = math.inf, whole: bool = False) -> list[float]:
    """Parse a list of numbers such as `1,2,4`. Raises `InvalidLoad`."""
    try:
        numbers = [float(each) for each in given.split(",")]
        if not all(least <= each <= most and (each.is_integer() or not whole) for each in numbers):
            raise ValueError
    except ValueError:
        bounds = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
        kind = "whole numbers" if whole else "numbers"
        raise InvalidLoad(f"{option} {given!r}: give {kind} of {bounds}, with commas between them") from None
    return numbers


def _object(option: str, given: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(given or "{}")
    except ValueError as error:
        raise InvalidLoad(f"{option} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidLoad(f"{option} must be a JSON object with the fields")
    return fields


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    pairs = {}
    for each in given or ():
        name, is_pair, value = each.partition("=")
        if not (is_pair and name.strip()):
            raise InvalidLoad(f"{option} {each!r}: give KEY=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs

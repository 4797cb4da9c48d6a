"""The options of commands that have many: a dataclass for each command, whose fields typer reads as options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

MOST_GB = 1e6  # upper limit of all sizes of one machine

MOST = 10**6  # upper limit of everything that measurements count, from prompts to blocks
MOST_TOKENS = 10**8  # of one request
MOST_RANKS = 128  # of one measurement, on this machine
MOST_ENGINES = 1024  # simulated ones
LONGEST_S = 1e6  # eleven days

Count = Annotated[int, typer.Option(min=1, max=MOST)]
Length = Annotated[int, typer.Option(min=1, max=MOST_TOKENS)]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """`baton serve`; an option that is not given is None."""

    model: Annotated[
        str | None,
        typer.Argument(help="Hugging Face model name, or a folder with config.json, safetensors and a tokenizer."),
    ] = None
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit on the Hugging Face Hub.  [default: main]")
    ] = None
    download_dir: Annotated[
        str | None, typer.Option(help="Folder for models downloaded from the Hub.  [default: the cache of `hf`]")
    ] = None
    unified: Annotated[
        int | None,
        typer.Option(min=1, help="Number of engines that do both prefill and decode.  [default: 1 without --prefill]"),
    ] = None
    prefill: Annotated[int | None, typer.Option(min=1, help="Number of prefill engines. Needs --decode.")] = None
    decode: Annotated[int | None, typer.Option(min=1, help="Number of decode engines. Needs --prefill.")] = None
    gateways: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of gateways on the port.  [default: 1; 2 on a machine with a GPU and 8 cores or more]"
        ),
    ] = None
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the HTTP server.  [default: 8000]")] = None
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None
    model_id: Annotated[
        str | None, typer.Option("--model-id", "--served-model-name", help="Model name that clients send.")
    ] = None
    api_key: Annotated[list[str] | None, typer.Option(help="API key that clients must send. May be repeated.")] = None
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(help="Web origin allowed by CORS: http://localhost:3000, or '*'. May be repeated."),
    ] = None
    config: Annotated[Path | None, typer.Option(help="Ray Serve config file that describes the application.")] = None
    tp: Annotated[int | None, typer.Option(help="Tensor parallel size of each engine.  [default: 1]")] = None
    dp: Annotated[int | None, typer.Option(help="Data parallel size of each engine.  [default: 1]")] = None
    ep: Annotated[bool, typer.Option("--ep", help="Enable expert parallelism.")] = False
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster to join; 'auto' finds the one on this machine.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """`baton plan`."""

    file: Annotated[Path, typer.Argument(help="Ray Serve config file, or a file with the args of one application.")]
    model: Annotated[
        str | None,
        typer.Option(
            help="Model to plan for instead of the file's: a folder with config.json, or a Hugging Face name."
        ),
    ] = None
    nodes: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Number of nodes.  [default: as many as needed]")
    ] = None
    gpus_per_node: Annotated[int, typer.Option(min=0, max=1024, help="GPUs in each node; 0: none.")] = 8
    gpu_memory: Annotated[float, typer.Option(min=1, max=MOST_GB, help="Memory of each GPU, in GB.")] = 80.0
    fp8: Annotated[
        bool,
        typer.Option(help="Whether the GPUs have FP8 tensor cores (Ada or later); without, FP8 weights take 16 bits."),
    ] = True
    memory: Annotated[
        float | None,
        typer.Option(min=1, max=MOST_GB, help="Host memory of each node, in GB.  [default: enough]"),
    ] = None
    disk: Annotated[
        float | None,
        typer.Option(min=1, max=MOST_GB, help="Disk space for KV tiers on each node, in GB.  [default: enough]"),
    ] = None
    load: Annotated[float, typer.Option(min=0, max=1e9, help="Expected requests per second.")] = 1.0
    prompt_tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="Prompt tokens per request.")] = 1024
    output_tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="Output tokens per request.")] = 256


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """`baton bench throughput`."""

    num_prompts: Count = 100
    input_len: Length = 128
    output_len: Length = 128
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """`baton bench latency`."""

    batch_size: Count = 8
    input_len: Length = 32
    output_len: Length = 128
    num_iters_warmup: Annotated[int, typer.Option(min=0, max=MOST)] = 2
    num_iters: Count = 10
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class DraftsOptions:
    """`baton bench drafts`."""

    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, max=MOST, help="Number of concurrent requests; may be repeated.  [default: 1, 8]"),
    ] = None
    input_len: Length = 512
    output_len: Annotated[int, typer.Option(min=2, max=MOST_TOKENS)] = 128  # the first token counts as prefill
    num_drafts: Annotated[
        int, typer.Option(min=1, max=MOST, help="Maximum number of draft tokens per request and step.")
    ] = 3
    acceptance: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of draft tokens that are right.")] = 0.8
    edit_every: Annotated[
        int | None,
        typer.Option(
            min=2, max=MOST, help="Draft with `suffix` from a prediction in which one of every N tokens is wrong."
        ),
    ] = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """`baton bench kv`."""

    model: Annotated[
        Path | None,
        typer.Argument(help="Folder with config.json, which determines the block size; without it, 1.8 MB."),
    ] = None
    input_len: Annotated[
        list[int] | None, typer.Option(min=1, max=MOST_TOKENS, help="Prompt tokens; may be repeated.")
    ] = None
    in_flight: Annotated[
        list[int] | None, typer.Option(min=1, max=MOST, help="Number of concurrent hand-offs; may be repeated.")
    ] = None
    run_blocks: Annotated[
        int,
        typer.Option(
            min=1, max=MOST, help="Length of each run of contiguous blocks; 1: all scattered, the worst case."
        ),
    ] = 1
    prefill_tp: Annotated[
        int, typer.Option(min=1, max=MOST_RANKS, help="Tensor parallel size of the side that holds the blocks.")
    ] = 1
    decode_tp: Annotated[
        int, typer.Option(min=1, max=MOST_RANKS, help="Tensor parallel size of the side that reads them.")
    ] = 1
    device: Annotated[str, typer.Option(help="'cpu' or 'cuda'.")] = "cpu"
    stages: Annotated[bool, typer.Option(help="Also show when each stage of a hand-off ends, in microseconds.")] = False


@dataclass(frozen=True, kw_only=True)
class AutoscaleOptions:
    """`baton bench autoscale`."""

    trace: Annotated[
        Path | None,
        typer.Option(help="Trace in Mooncake's JSON lines format; without it, synthetic load with tides and bursts."),
    ] = None
    num_prompts: Count = 3000
    request_rate: Annotated[float, typer.Option(min=0.001, help="Mean requests per second.")] = 5.0
    input_len: Annotated[int, typer.Option(min=4, max=MOST, help="Mean prompt tokens.")] = 1536
    output_len: Count = 128
    max_replicas: Annotated[
        int, typer.Option(min=1, max=MOST_ENGINES, help="Maximum number of engine groups in each fleet.")
    ] = 4
    start: Annotated[float, typer.Option(min=0, max=LONGEST_S, help="Seconds that an engine group takes to start.")] = (
        20.0
    )
    ttft: Annotated[float, typer.Option(min=0.001, max=LONGEST_S, help="Target time to first token, in seconds.")] = 2.0
    inter_token: Annotated[
        float, typer.Option(min=0.001, max=LONGEST_S, help="Target inter-token latency, in seconds.")
    ] = 0.05
    downscale_delay: Annotated[
        float, typer.Option(min=0, max=LONGEST_S, help="Seconds of low load before a fleet shrinks.")
    ] = 60.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """`baton bench router`."""

    unified: Annotated[int, typer.Option(min=0, max=MOST_ENGINES, help="Number of unified engines.")] = 16
    prefill: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_ENGINES, help="Number of prefill engines; with --decode, in place of unified engines."
        ),
    ] = 0
    decode: Annotated[int, typer.Option(min=0, max=MOST_ENGINES, help="Number of decode engines.")] = 0
    gateways: Annotated[int, typer.Option(min=1, max=MOST_ENGINES)] = 4
    num_blocks: Annotated[int, typer.Option(min=1, max=MOST, help="KV blocks in each engine.")] = 8192
    host_blocks: Annotated[int, typer.Option(min=0, max=MOST, help="Blocks in each engine's host memory tier.")] = 0
    disk_blocks: Annotated[int, typer.Option(min=0, max=MOST, help="Blocks in each engine's disk tier.")] = 0
    link_gb_per_s: Annotated[
        float,
        typer.Option(min=1e-3, help="Bandwidth of each engine's link in GB/s, for hand-offs of an 8B model's KV."),
    ] = 131.0
    slow_times: Annotated[float, typer.Option(min=1, help="Factor by which the first engine is slowed down.")] = 1.0
    slow_from: Annotated[float, typer.Option(min=0, help="Second at which the slowdown starts.")] = 0.0
    slow_until: Annotated[float, typer.Option(min=0, help="Second at which the slowdown ends.")] = math.inf
    trace: Annotated[
        Path | None, typer.Option(help="Trace in Mooncake's JSON lines format; without it, random requests.")
    ] = None
    num_prompts: Count = 4000
    request_rate: Annotated[float, typer.Option(min=0.001, help="Requests per second.")] = 48.0
    input_len: Annotated[int, typer.Option(min=4, max=MOST, help="Mean prompt tokens.")] = 4096
    output_len: Count = 64
    policies: Annotated[
        list[str] | None, typer.Option("--policy", help="Routing policy to simulate; may be repeated. Default: all.")
    ] = None
    seed: int = 0

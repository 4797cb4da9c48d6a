"""The options of commands that have many: a dataclass for each command, whose fields typer reads as options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

MOST_GB = 1e6  # upper limit of all sizes of one machine

Count = Annotated[int, typer.Option(min=1)]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """`baton serve`; an option that is not given is None."""

    model: Annotated[
        str | None,
        typer.Argument(help="A name of the Hub, or a folder with config.json, safetensors and a tokenizer."),
    ] = None
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a name of the Hub.  [default: main]")
    ] = None
    download_dir: Annotated[
        str | None, typer.Option(help="Folder in which names of the Hub are kept.  [default: the cache of `hf`]")
    ] = None
    unified: Annotated[int | None, typer.Option(min=1, help="Engines that do both phases. The default: one.")] = None
    prefill: Annotated[int | None, typer.Option(min=1, help="Engines that read prompts. Needs --decode.")] = None
    decode: Annotated[int | None, typer.Option(min=1, help="Engines that write answers. Needs --prefill.")] = None
    gateways: Annotated[
        int | None,
        typer.Option(
            min=1, help="Gateways that share the port.  [default: 1; 2 on a machine with a GPU and 8 cores or more]"
        ),
    ] = None
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the HTTP server.  [default: 8000]")] = None
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None
    model_id: Annotated[
        str | None, typer.Option("--model-id", "--served-model-name", help="What clients call the model.")
    ] = None
    api_key: Annotated[list[str] | None, typer.Option(help="A key that clients must send. May be repeated.")] = None
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of web pages that may call: http://localhost:3000, or '*'. May be repeated."),
    ] = None
    config: Annotated[Path | None, typer.Option(help="A Serve config file to take the application from.")] = None
    tp: Annotated[int | None, typer.Option(help="Devices of one engine (tensor parallelism).  [default: 1]")] = None
    dp: Annotated[int | None, typer.Option(help="Data-parallel ranks of one engine.  [default: 1]")] = None
    ep: Annotated[bool, typer.Option("--ep", help="Spread experts over the devices.")] = False
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster to join ('auto' finds the one on this machine).")
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """`baton plan`."""

    file: Annotated[Path, typer.Argument(help="A Serve config file, or one with one application's args.")]
    model: Annotated[
        str | None,
        typer.Option(help="A folder with the model's config.json, or a name of the Hub, in place of the file's."),
    ] = None
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of machines.  [default: as many as it takes]")] = None
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs of one machine; 0: none.")] = 8
    gpu_memory: Annotated[float, typer.Option(min=1, max=MOST_GB, help="Memory of one GPU, in GB.")] = 80.0
    fp8: Annotated[
        bool, typer.Option(help="GPUs have FP8 tensor cores (Ada, Hopper and later), else weights of 8 bits take 16.")
    ] = True
    memory: Annotated[
        float | None,
        typer.Option(min=1, max=MOST_GB, help="Memory of one machine beside its GPUs', in GB.  [default: enough]"),
    ] = None
    disk: Annotated[
        float | None,
        typer.Option(min=1, max=MOST_GB, help="Disk for KV tiers of one machine, in GB.  [default: enough]"),
    ] = None
    load: Annotated[float, typer.Option(min=0, max=1e9, help="Requests a second that are to be served.")] = 1.0
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of one request.")] = 1024
    output_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of one request.")] = 256


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """`baton bench throughput`."""

    num_prompts: Count = 100
    input_len: Count = 128
    output_len: Count = 128
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """`baton bench latency`."""

    batch_size: Count = 8
    input_len: Count = 32
    output_len: Count = 128
    num_iters_warmup: Annotated[int, typer.Option(min=0)] = 2
    num_iters: Count = 10
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class DraftsOptions:
    """`baton bench drafts`."""

    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at a time; may be repeated.  [default: 1, 8]")
    ] = None
    input_len: Count = 512
    output_len: Count = 128
    num_drafts: Annotated[int, typer.Option(min=1, help="Drafts of a request in a step, at most.")] = 3
    acceptance: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of guesses that are right.")] = 0.8
    edit_every: Annotated[
        int | None,
        typer.Option(min=2, help="`suffix` guesses from a prediction of which one token in so many is wrong."),
    ] = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """`baton bench kv`."""

    model: Annotated[
        Path | None, typer.Argument(help="A folder with config.json, for the size of blocks; without it, 1.8 MB each.")
    ] = None
    input_len: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a prompt; may be repeated.")] = None
    in_flight: Annotated[list[int] | None, typer.Option(min=1, help="Prompts at once; may be repeated.")] = None
    run_blocks: Annotated[
        int, typer.Option(min=1, help="Blocks that lie side by side; 1: each elsewhere, the worst case.")
    ] = 1
    prefill_tp: Annotated[int, typer.Option(min=1, help="Ranks that hold the blocks, each its KV heads.")] = 1
    decode_tp: Annotated[int, typer.Option(min=1, help="Ranks that read them.")] = 1
    device: Annotated[str, typer.Option(help="'cpu' or 'cuda'.")] = "cpu"
    stages: Annotated[bool, typer.Option(help="Also show when each step of a hand-off is done, in microseconds.")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class AutoscaleOptions:
    """`baton bench autoscale`."""

    trace: Annotated[Path | None, typer.Option(help="JSON lines in Mooncake's format; else tides and bursts.")] = None
    num_prompts: Count = 3000
    request_rate: Annotated[float, typer.Option(min=0.001, help="Mean requests a second.")] = 5.0
    input_len: Annotated[int, typer.Option(min=4, help="Mean tokens of a prompt.")] = 1536
    output_len: Count = 128
    max_replicas: Annotated[int, typer.Option(min=1, help="Groups of each fleet, at most.")] = 4
    start: Annotated[float, typer.Option(min=0, help="Seconds that a group takes to start.")] = 20.0
    ttft: Annotated[float, typer.Option(min=0.001, help="Target for the first token, in seconds.")] = 2.0
    inter_token: Annotated[float, typer.Option(min=0.001, help="Target between tokens, in seconds.")] = 0.05
    downscale_delay: Annotated[float, typer.Option(min=0, help="Seconds before a fleet shrinks.")] = 60.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """`baton bench router`."""

    unified: Annotated[int, typer.Option(min=0, help="Unified engines.")] = 16
    prefill: Annotated[
        int, typer.Option(min=0, help="Prefill engines; with --decode, in the place of unified ones.")
    ] = 0
    decode: Annotated[int, typer.Option(min=0, help="Decode engines.")] = 0
    gateways: Count = 4
    num_blocks: Annotated[int, typer.Option(min=1, help="KV blocks of each engine.")] = 8192
    host_blocks: Annotated[
        int, typer.Option(min=0, help="Blocks that the host's memory has room for behind each engine's own.")
    ] = 0
    disk_blocks: Annotated[int, typer.Option(min=0, help="Blocks that the disk has room for.")] = 0
    link_gb_per_s: Annotated[
        float, typer.Option(min=1e-3, help="GB/s of the link of each engine, for hand-offs of an 8B model's KV.")
    ] = 131.0
    slow_times: Annotated[float, typer.Option(min=1, help="How many times as long the first engine's steps take.")] = (
        1.0
    )
    slow_from: Annotated[float, typer.Option(min=0, help="Seconds after which it becomes slow.")] = 0.0
    slow_until: Annotated[float, typer.Option(min=0, help="Seconds after which it is as fast as the others again.")] = (
        math.inf
    )
    trace: Annotated[Path | None, typer.Option(help="JSON lines in Mooncake's format; else random requests.")] = None
    num_prompts: Count = 4000
    request_rate: Annotated[float, typer.Option(min=0.001, help="Requests a second.")] = 48.0
    input_len: Annotated[int, typer.Option(min=4, help="Mean tokens of a prompt.")] = 4096
    output_len: Count = 64
    policies: Annotated[
        list[str] | None, typer.Option("--policy", help="Policy to run; may be repeated. By default all.")
    ] = None
    seed: int = 0

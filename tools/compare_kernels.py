"""Measure kernels of recurrent states beside flash-linear-attention's and vLLM's: the same inputs, in one process.

    python tools/compare_kernels.py                        # all ops; a peer that is not installed is named
    python tools/compare_kernels.py gdn kda --only prefill # some ops, and shapes with this word in their names
    python tools/compare_kernels.py ssd --without fla

    gdn            gated delta rule, one decay per head
    kda            ... one decay per key dimension
    ssd            Mamba-2; flash-linear-attention has no kernel for it
    causal_conv    causal convolution

Needs a GPU. Shapes are those of `baton bench kernels`. Times are medians over replays of captured graphs, in
milliseconds; ratios above 1 mean that Baton is faster. A peer does what Baton's op does, with as many kernels as it
needs: gates from the outputs of projections, norms of queries and keys, and vLLM's also reads and writes states in
their slots, as its layers do. flash-linear-attention takes and returns states without slots.

The last columns are ||peer - Baton|| / ||Baton|| of a peer's outputs and of its states afterwards. The first run of a
peer compiles and tunes its kernels, which takes minutes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.kernels.causal_conv import bench as conv_bench
from baton.kernels.causal_conv import causal_conv
from baton.kernels.compiler import recording, start_compiler
from baton.kernels.gated_delta import bench as delta_bench
from baton.kernels.gated_delta import gated_delta
from baton.kernels.roofline import cycling, seconds_per_call
from baton.kernels.ssd import bench as ssd_bench
from baton.kernels.ssd import ssd
from baton.kernels.state_batch import StateBatch
from baton.kernels.state_bench import bench_steps

PEERS = {"fla": ("fla", "flash-linear-attention"), "vLLM": ("vllm", "vllm")}  # module, distribution
BATON = "Baton"
VLLM_MAMBA = "vllm.model_executor.layers.mamba.ops"
SSD_CHUNKS = {"Nemotron-H": 128, "Granite-4": 256}  # `chunk_size` of the models' configs, which vLLM's kernels take
COLUMNS = "{:<12}{:<26}{:>10}{:>10}{:>10}{:>8}{:>8}   {:<20}{:<20}"


@dataclass(frozen=True)
class Side:
    """One library's op on a copy of the states of its own.

    `run(batch)` computes the batch of this number and returns the outputs of its tokens. `states(batch)` returns the
    states [sequences, ...] after the last run of this batch, in Baton's layout.
    """

    run: Callable[[int], Tensor]
    states: Callable[[int], Tensor]
    num_batches: int


@dataclass(frozen=True)
class Case:
    """One shape. `sides` has a function per library, which copies the states of the inputs when it is called."""

    op: str
    shape: str
    make: Callable[[], Any]
    sides: Mapping[str, Callable[[Any], Side]]


# The gated delta rule


def baton_delta(made: delta_bench.DeltaInputs) -> Side:
    state, scale = made.state.clone(), made.q.shape[2] ** -0.5

    def run(batch: int) -> Tensor:
        return gated_delta(made.q, made.k, made.v, made.gate, state, made.batches[batch], scale=scale)

    return Side(run, lambda batch: state[made.batches[batch].targets.long()], len(made.batches))


def fla_delta(made: delta_bench.DeltaInputs) -> Side:
    gate, (starts, is_decode) = made.gate, _starts(made.batches[0])
    name = "kda" if gate.per_dim else "gated_delta_rule"
    op = getattr(importlib.import_module(f"fla.ops.{name}"), f"{'fused_recurrent' if is_decode else 'chunk'}_{name}")
    states = [made.state[batch.sources.long()] for batch in made.batches]
    rows = [rows.unsqueeze(1 if is_decode else 0) for rows in (made.q, made.k, made.v, gate.decay, gate.beta)]
    assert gate.bias is not None
    in_kernel = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
    options = {
        **dict(zip(("q", "k", "v", "g", "beta"), rows, strict=True)),
        **in_kernel,
        "A_log": gate.log_rate,
        "dt_bias": gate.bias.flatten(),
        "output_final_state": True,
        "cu_seqlens": None if is_decode else starts.long(),
    }
    last: list[Any] = [None]

    def run(batch: int) -> Tensor:
        out, last[0] = op(initial_state=states[batch], **options)
        return out.flatten(0, 1)

    return Side(run, lambda _: last[0], len(states))


def vllm_gdn(made: delta_bench.DeltaInputs) -> Side:
    """Return vLLM's kernels as its layer calls them. Its states have values first."""
    gate, (starts, is_decode) = made.gate, _starts(made.batches[0])
    arena = _behind_reserved(made.state.transpose(-1, -2))
    slots = [batch.sources + 1 for batch in made.batches]
    packed = torch.cat([rows.flatten(1) for rows in (made.q, made.k, made.v)], dim=1)  # as a convolution writes them
    gates = {"a": gate.decay, "b": gate.beta, "A_log": gate.log_rate, "dt_bias": gate.bias}
    _, num_key_heads, key_dim = made.q.shape
    update = _vllm("fused_recurrent").fused_recurrent_gated_delta_rule_packed_decode
    prepare = _vllm("fused_gdn_prefill_post_conv").fused_post_conv_prep
    chunk, index = _vllm("chunk").chunk_gated_delta_rule, _vllm("index")
    dims = {"num_k_heads": num_key_heads, "head_k_dim": key_dim, "head_v_dim": made.v.shape[2]}
    chunks = {
        "cu_seqlens": starts,
        "chunk_indices": index.prepare_chunk_indices(starts, 64),
        "chunk_offsets": index.prepare_chunk_offsets(starts, 64),
    }

    def decode(batch: int) -> Tensor:
        out = torch.empty_like(made.v).unsqueeze(1)
        options = {"scale": key_dim**-0.5, "ssm_state_indices": slots[batch], "use_qk_l2norm_in_kernel": True}
        update(packed, **gates, initial_state=arena, out=out, **options)
        return out.squeeze(1)

    def prefill(batch: int) -> Tensor:
        rows = (each.unsqueeze(0) for each in prepare(packed, **gates, **dims))
        out, arena[slots[batch]] = chunk(*rows, initial_state=arena[slots[batch]], output_final_state=True, **chunks)
        return out.squeeze(0)

    run, states = decode if is_decode else prefill, lambda batch: arena[slots[batch].long()].transpose(-1, -2)
    return Side(run, states, len(slots))


def vllm_kda(made: delta_bench.DeltaInputs) -> Side:
    """Return vLLM's kernels as its layer calls them. Outputs of prompts overwrite their values, run after run."""
    kda, gate, (starts, is_decode) = _vllm("kda"), made.gate, _starts(made.batches[0])
    arena = _behind_reserved(made.state.transpose(-1, -2))
    slots = [batch.sources + 1 for batch in made.batches]
    q, k, v, decay, beta = (
        rows.unsqueeze(0) for rows in (made.q, made.k, made.v.clone(), gate.decay, gate.beta.float())
    )
    options = {"q": q, "k": k, "v": v, "use_qk_l2norm_in_kernel": True, "cu_seqlens": starts}

    def decode(batch: int) -> Tensor:
        decays = kda.fused_kda_gate(gate.decay.flatten(1), gate.log_rate, gate.decay.shape[2], g_bias=gate.bias)
        states = {"initial_state": arena, "ssm_state_indices": slots[batch]}
        return kda.fused_recurrent_kda(g=decays.unsqueeze(0), beta=beta.sigmoid(), **states, **options)[0].squeeze(0)

    def prefill(batch: int) -> Tensor:
        gates = {"raw_g": decay, "beta": beta.sigmoid(), "A_log": gate.log_rate, "g_bias": gate.bias}
        states = {"initial_state": arena[slots[batch]], "output_final_state": True}
        out, arena[slots[batch]] = kda.chunk_kda_with_fused_gate(**gates, **states, **options)
        return out.squeeze(0)

    run, states = decode if is_decode else prefill, lambda batch: arena[slots[batch].long()].transpose(-1, -2)
    return Side(run, states, len(slots))


def _vllm(module: str) -> Any:
    return importlib.import_module(f"vllm.third_party.flash_linear_attention.ops.{module}")


# Mamba-2


def baton_ssd(made: ssd_bench.MambaInputs) -> Side:
    state = made.state.clone()

    def run(batch: int) -> Tensor:
        return ssd(made.x, made.b, made.c, made.time_steps, state, made.batches[batch], skip=made.skip)

    return Side(run, lambda batch: state[made.batches[batch].targets.long()], len(made.batches))


def vllm_ssd(made: ssd_bench.MambaInputs, chunk_size: int) -> Side:
    arena, steps = _behind_reserved(made.state), made.time_steps
    slots = [batch.sources + 1 for batch in made.batches]
    starts, is_decode = _starts(made.batches[0])
    rate, out = -steps.log_rate.exp(), torch.empty_like(made.x)
    assert steps.bias is not None
    dims, state_dims = made.x.shape[2], made.b.shape[2]
    wide_rate, skip, bias = (vector.unsqueeze(-1).expand(-1, dims) for vector in (rate, made.skip, steps.bias))
    wide_rate, dt = wide_rate.unsqueeze(-1).expand(-1, -1, state_dims), steps.raw.unsqueeze(-1).expand(-1, -1, dims)
    update = importlib.import_module(f"{VLLM_MAMBA}.mamba_ssm").selective_state_update
    scan = importlib.import_module(f"{VLLM_MAMBA}.ssd_combined").mamba_chunk_scan_combined_varlen
    metadata = importlib.import_module("vllm.v1.attention.backends.mamba2_attn").compute_varlen_chunk_metadata
    names = ("cu_chunk_seqlens", "last_chunk_indices", "seq_idx")
    chunks = dict(zip(names, metadata(starts, chunk_size), strict=True))
    vectors = {"D": made.skip, "dt_bias": steps.bias, "dt_softplus": True}

    def decode(batch: int) -> Tensor:
        options = {"dt_softplus": True, "state_batch_indices": slots[batch], "out": out}
        update(arena, made.x, dt, wide_rate, made.b, made.c, skip, bias, **options)
        return out

    def prefill(batch: int) -> Tensor:
        states = {"initial_states": arena[slots[batch]], "state_dtype": torch.float32, "out": out}
        rows = (made.x, steps.raw, rate, made.b, made.c)
        arena[slots[batch]] = scan(*rows, chunk_size, starts, **chunks, **vectors, **states)
        return out

    return Side(decode if is_decode else prefill, lambda batch: arena[slots[batch].long()], len(slots))


# The causal convolution


def baton_conv(made: conv_bench.ConvInputs) -> Side:
    state = made.state.clone()
    return Side(
        lambda batch: causal_conv(made.inputs[batch], made.weight, state, made.batch),
        lambda _: state[made.batch.targets.long()],
        len(made.inputs),
    )


def fla_conv(made: conv_bench.ConvInputs) -> Side:
    """Return the peer's convolution, whose states have one input more than Baton's, the oldest."""
    conv = importlib.import_module("fla.modules.causal_conv1d")
    starts, is_decode = _starts(made.batch)
    tails = made.state[made.batch.sources.long()]
    last = [torch.cat([torch.zeros_like(tails[..., :1]), tails], dim=-1)]
    first, cu_seqlens = last[0], starts.long()

    def run(batch: int) -> Tensor:
        x = made.inputs[batch]
        if is_decode:
            return conv.causal_conv1d_update(x, first, weight=made.weight, activation="silu")[0]
        states = {"initial_state": first, "output_final_state": True, "cu_seqlens": cu_seqlens}
        out, last[0] = conv.causal_conv1d(x.unsqueeze(0), made.weight, activation="silu", **states)
        return out.squeeze(0)

    return Side(run, lambda _: last[0][..., 1:], len(made.inputs))


def vllm_conv(made: conv_bench.ConvInputs) -> Side:
    """Return vLLM's convolution. Its states have channels last, and decodes overwrite their inputs."""
    conv = importlib.import_module(f"{VLLM_MAMBA}.causal_conv1d")
    starts, is_decode = _starts(made.batch)
    arena = _behind_reserved(made.state.transpose(1, 2)).transpose(1, 2)
    slots = made.batch.sources + 1
    has_state = torch.ones_like(slots, dtype=torch.bool)
    if is_decode:
        inputs = [x.clone() for x in made.inputs]

        def run(batch: int) -> Tensor:
            return conv.causal_conv1d_update(
                inputs[batch], arena, made.weight, None, "silu", conv_state_indices=slots, validate_data=True
            )
    else:
        metadata = importlib.import_module("vllm.v1.attention.backends.utils").compute_causal_conv1d_metadata
        names = ("nums_dict", "batch_ptr", "token_chunk_offset_ptr")
        plan = types.SimpleNamespace(**dict(zip(names, metadata(starts.cpu(), device=starts.device), strict=True)))

        def run(batch: int) -> Tensor:
            return conv.causal_conv1d_fn(
                *(made.inputs[batch].T, made.weight, None),
                conv_states=arena,
                query_start_loc=starts,
                cache_indices=slots,
                has_initial_state=has_state,
                activation="silu",
                metadata=plan,
            ).T

    return Side(run, lambda _: arena[slots.long()], len(made.inputs))


def _starts(batch: StateBatch) -> tuple[Tensor, bool]:
    """Return the first token of each sequence and the end [sequences + 1] int32, and whether all are decodes."""
    return batch.query_start, batch.num_chunks == 0


def _behind_reserved(state: Tensor) -> Tensor:
    """Return a copy of the states with one more in front, which vLLM never reads."""
    return torch.cat([torch.zeros_like(state[:1]), state]).contiguous()


# Measurement


def cases(device: torch.device) -> Iterator[Case]:
    for shape, lengths in bench_steps(device).items():
        for delta, peer in ((delta_bench.GDN, vllm_gdn), (delta_bench.KDA, vllm_kda)):
            yield Case(
                delta.name.lower(),
                shape,
                functools.partial(delta_bench.step, delta, lengths, device),
                {BATON: baton_delta, "fla": fla_delta, "vLLM": peer},
            )
        for mamba in (ssd_bench.NEMOTRON_H, ssd_bench.GRANITE_4):
            yield Case(
                "ssd",
                f"{mamba.name} {shape}",
                functools.partial(ssd_bench.step, mamba, lengths, device),
                {BATON: baton_ssd, "vLLM": functools.partial(vllm_ssd, chunk_size=SSD_CHUNKS[mamba.name])},
            )
        yield Case(
            "causal_conv",
            shape,
            functools.partial(conv_bench.step, lengths, device),
            {BATON: baton_conv, "fla": fla_conv, "vLLM": vllm_conv},
        )


def row(case: Case, peers: Sequence[str], device: torch.device) -> str:
    """Measure a case, and return its line of the table."""
    made = case.make()
    sides = {name: make(made) for name, make in case.sides.items() if name in (BATON, *peers)}
    own, times_ms, differences = sides[BATON], {}, {}
    expected = (own.run(0).clone(), own.states(0).clone())
    for name, side in sides.items():
        if side is not own:
            given = (side.run(0), side.states(0))
            differences[name] = " / ".join(f"{_difference(*pair):.1e}" for pair in zip(given, expected, strict=True))
        times_ms[name] = 1e3 * seconds_per_call(cycling(side.run, range(side.num_batches)), device)
    ratios = [times_ms[peer] / times_ms[BATON] if peer in times_ms else None for peer in PEERS]
    return COLUMNS.format(
        *(case.op, case.shape),
        *(_number(times_ms.get(name), 4) for name in (BATON, *PEERS)),
        *(_number(ratio, 2) for ratio in ratios),
        *(differences.get(peer, "-") for peer in PEERS),
    )


def _difference(given: Tensor, expected: Tensor) -> float:
    norm, wide = torch.linalg.vector_norm, expected.float()
    return float(norm(given.float() - wide) / norm(wide))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def installed(wanted: Sequence[str]) -> list[str]:
    """Return the peers that can be imported, and print the versions of these and the names of the others."""
    found = [peer for peer in wanted if importlib.util.find_spec(PEERS[peer][0]) is not None]
    for peer in wanted:
        version = importlib.metadata.version(PEERS[peer][1]) if peer in found else "not installed"
        print(f"{peer}: {PEERS[peer][1]} {version}", flush=True)
    return found


def compile_ahead(chosen: Sequence[Case]) -> None:
    """Compile Baton's kernels of these cases, in parallel."""
    compiler = start_compiler()
    if compiler is None:
        return
    try:
        with recording(compiler.submit):
            for case in chosen:
                case.sides[BATON](case.make()).run(0)
        compiler.wait()
    finally:
        compiler.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ops = ("gdn", "kda", "ssd", "causal_conv")
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(ops)}; by default all")
    parser.add_argument("--only", default="", metavar="WORD", help="shapes with this word in their names")
    parser.add_argument("--without", nargs="+", default=[], choices=PEERS, help="peers to leave out")
    given = parser.parse_args()
    if unknown := sorted(set(given.ops) - set(ops)):
        parser.error(f"no op {', '.join(unknown)}: choose from {', '.join(ops)}")
    if not torch.cuda.is_available():
        parser.exit(1, "there is no GPU here to measure on\n")
    device = torch.device("cuda", torch.cuda.current_device())
    peers = installed([peer for peer in PEERS if peer not in given.without])
    chosen = [case for case in cases(device) if case.op in (given.ops or ops) and given.only in case.shape]
    chosen.sort(key=lambda case: ops.index(case.op))
    with torch.inference_mode():
        compile_ahead(chosen)
        print(COLUMNS.format("op", "shape", "Baton ms", *(f"{peer} ms" for peer in PEERS), *PEERS, *PEERS), flush=True)
        for case in chosen:
            print(row(case, peers, device), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

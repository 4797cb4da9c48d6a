"""The outputs of `baton plan` and `baton check`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.cluster.contracts import LoadBalancing
from baton.cluster.gateway.routing.ranks import spell_ranks
from baton.cluster.planning.model_checks import check_model, check_model_files, needs_weights
from baton.cluster.planning.placement import RankPlan
from baton.cluster.planning.plan import THROUGH_TCP, Plan
from baton.cluster.planning.sizing import GB, HostNeeds
from baton.cluster.pluralize import pluralize
from baton.cluster.spec import (
    FleetSpec,
    InvalidSpec,
    has_model,
    is_ray_cluster,
    load_ray_cluster,
    load_specs,
    read_mapping,
)
from baton.engine.core.layout import GroupLayout
from baton.engine.hf_config.checkpoint import has_weights
from baton.engine.hf_config.errors import HubUnreachable, ModelNotFetched
from baton.engine.hf_config.hub import Files, is_hub_name

from .cli_common import WidestThatFits


def print_plan(console: Console, name: str, plan: Plan) -> None:
    spec, machines = plan.spec, plan.machines
    size = (
        f"{pluralize(machines.gpus_per_node, 'GPU')} of {machines.gpu_memory_bytes / GB:g} GB"
        if machines.gpus_per_node
        else "no GPU"
    )
    if resources := {name for fleet in spec.fleets.present.values() for name in fleet.resources}:
        size += f", each with enough of {', '.join(sorted(resources))}"
    nodes = pluralize(plan.num_nodes, "node")
    console.print(f"[bold]{name}[/]: {spec.served_model_id} on {nodes} with {size}", highlight=False)
    console.print(_placement(plan))
    if plan.fleets:
        console.print(_memory(plan))
    if any(len(fleet.arenas) > 1 for fleet in plan.fleets):
        console.print(_arenas(plan))
    if any(spec.fleets.present[fleet.role].kv_tiers is not None for fleet in plan.fleets):
        console.print(_tiers(plan))
    if any(needs.memory or needs.disk for needs in plan.hosts):
        console.print(_hosts(plan))
    console.print(_gateways(plan), highlight=False)
    if len(plan.fleets) == len(spec.fleets.present):  # otherwise the size of a hand-off is unknown
        _print_bandwidth(console, plan)
    for assumption in plan.assumptions:
        console.print(f"assumed: {assumption}", highlight=False)
    for note in plan.notes:
        console.print(f"[yellow]note:[/] {note}", highlight=False)
    for refusal in plan.refusals:
        console.print(f"[red]refused:[/] {refusal}", highlight=False)


def _placement(plan: Plan) -> Table:
    """Tabulate placements, with one row for all ranks of a group on one node."""
    table = Table(title="Placement", title_justify="left")
    for column in ("node", "role", "group", "ranks", "workers"):
        table.add_column(column)
    lines: dict[tuple[int, str, int], list[RankPlan]] = defaultdict(list)
    for rank in plan.ranks:
        lines[rank.node, rank.role, rank.group].append(rank)
    for (node, role, group), ranks in lines.items():
        engines = spell_ranks({rank.engine_rank for rank in ranks})
        dp_ranks = spell_ranks({rank.dp_rank for rank in ranks})
        tp_ranks = spell_ranks({rank.tp_rank for rank in ranks})
        table.add_row(str(node), role, str(group), engines, f"{len(ranks)}: dp {dp_ranks}, tp {tp_ranks}")
    return table


def _memory(plan: Plan) -> WidestThatFits:
    """Tabulate the memory of each fleet's workers, with a row for each fleet, or a column where that is too wide."""
    sizes = ("weights", "step (estimated)", "KV")
    counts = ("KV blocks", "max_model_len", "requests of an engine", "requests of a step", "tokens of a step")
    lines: list[tuple[str, ...]] = [("role", "device", *sizes, *counts)]
    for fleet in plan.fleets:
        gigabytes = (f"{size / GB:.2f}" for size in (fleet.weight_bytes, fleet.step_bytes, fleet.kv_bytes))
        counted = (fleet.num_blocks, fleet.max_model_len, fleet.num_requests(plan.traffic))
        numbers = map(str, (*counted, fleet.steps.max_num_seqs, fleet.steps.max_num_batched_tokens))
        lines.append((fleet.role, fleet.device, *gigabytes, *numbers))
    tables = []
    for heads, *rows in (lines, list(zip(*lines, strict=True))):
        table = Table(title="Memory of each worker, GB", title_justify="left")
        for head in heads:
            table.add_column(head, justify="left" if head in ("role", "device") else "right")
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return WidestThatFits(*tables)


def _arenas(plan: Plan) -> Table:
    """Tabulate how a worker's KV memory is divided between cache groups."""
    table = Table(title="KV memory of each worker by cache group", title_justify="left")
    for column in ("role", "keeps", "layers", "KV blocks", "GB"):
        table.add_column(column, justify="left" if column in ("role", "keeps") else "right")
    for fleet in plan.fleets:
        for arena in fleet.arenas:
            counts = (str(len(arena.group.layers)), str(arena.num_blocks))
            table.add_row(fleet.role, _keeps(arena.group), *counts, f"{arena.num_bytes / GB:.2f}")
    return table


def _keeps(group: GroupLayout) -> str:
    return group.kind if group.window is None else f"the last {group.window} tokens"


def _tiers(plan: Plan) -> Table:
    """Tabulate the blocks of each cache group that a worker's tiers hold."""
    table = Table(title="Blocks in the KV tiers of each worker by cache group", title_justify="left")
    for column in ("role", "keeps", "in memory", "on disk"):
        table.add_column(column, justify="left" if column in ("role", "keeps") else "right")
    for fleet in plan.fleets:
        tiers = plan.spec.fleets.present[fleet.role].kv_tiers
        if tiers is not None:
            slots = zip(fleet.tier_slots(tiers.host_bytes), fleet.tier_slots(tiers.disk_bytes), strict=True)
            for arena, (num_host, num_disk) in zip(fleet.arenas, slots, strict=True):
                table.add_row(fleet.role, _keeps(arena.group), str(num_host), str(num_disk))
    return table


def _hosts(plan: Plan) -> Table:
    """Tabulate the memory and disk that nodes need, with one row for equal nodes."""
    table = Table(title="Memory and disk of each node beside its GPUs, GB", title_justify="left")
    table.add_column("nodes")
    for column in ("KV tiers", "host buffer", "models without a GPU", "memory in all", "disk"):
        table.add_column(column, justify="right")
    alike: dict[HostNeeds, list[int]] = defaultdict(list)
    for node, needs in enumerate(plan.hosts):
        alike[needs].append(node)
    for needs, nodes in alike.items():
        sizes = (needs.tiers, needs.buffer, needs.model, needs.memory, needs.disk)
        table.add_row(spell_ranks(set(nodes)), *(f"{size / GB:.2f}" for size in sizes))
    return table


def _gateways(plan: Plan) -> str:
    spec = plan.spec
    nodes = len({rank.node for rank in plan.ranks if rank.role.writes_answers})
    count, port = spec.num_gateways(nodes), spec.gateway.port
    each = {
        LoadBalancing.INTERNAL: f"at port {port} of their nodes; each reaches every rank",
        LoadBalancing.HYBRID: f"at port {port} of the nodes that write answers; each reaches the ranks of its node",
        LoadBalancing.EXTERNAL: f"at ports {port}, {port + 1}, ... of nodes that write answers; each reaches a rank",
    }
    return f"Gateways ({spec.load_balancing}): {count}, {each[spec.load_balancing]}"


def _print_bandwidth(console: Console, plan: Plan) -> None:
    load = plan.traffic
    requests = pluralize(load.requests_per_s, "request")
    line = f"At {requests} a second of {load.prompt_tokens} + {load.output_tokens} tokens: "
    if (bandwidth := plan.bandwidth) is None:
        line += "nothing is handed over"
    else:
        line += (
            f"{bandwidth.request / GB:.3f} GB a hand-off, {bandwidth.total / GB:.2f} GB/s in all, "
            f"{bandwidth.prefill_rank / GB:.2f} from each prefill worker, "
            f"{bandwidth.decode_rank / GB:.2f} to each decode worker"
        )
    console.print(line, highlight=False)


def check_file(file: Path) -> Iterator[tuple[str, bool]]:
    """Yield a line for each application in a file, and whether it was checked completely. Raises `InvalidSpec`."""
    content = read_mapping(file)
    if is_ray_cluster(content):
        cluster = load_ray_cluster(content)
        workers = pluralize(cluster.max_workers, "worker")
        slow = f"; but {cluster.tcp_only}: {THROUGH_TCP}" if cluster.tcp_only and cluster.max_workers else ""
        yield f"{cluster.name} is fine: a Ray cluster of a head and up to {workers}{slow}", True
        return
    for name, spec in load_specs(content, needs_model=False).items():
        yield _check_application(name, spec)


def _check_application(name: str, spec: FleetSpec) -> tuple[str, bool]:
    unchecked = ""
    if is_hub_name(spec.model):
        unchecked = _check_named(spec)
    elif not has_model(spec.model):
        unchecked = f"how {spec.model}, not on this machine, divides"
    else:
        check_model(spec)
        with_weights = needs_weights(spec)
        if with_weights and not has_weights(Path(spec.model)):
            unchecked = f"the weights and the tokenizer of {spec.model}, where no weights are"
        else:
            check_model_files(spec, with_weights=with_weights)
    fleets = ", ".join(f"{fleet.size_text} {role}" for role, fleet in spec.fleets.present.items())
    aside = f" (not checked: {unchecked})" if unchecked else ""
    return f"{name} is fine: {spec.served_model_id}, {fleets}{aside}", not unchecked


def _check_named(spec: FleetSpec) -> str:
    """Check a model by its files on the Hub, and return which checks are left. Raises `InvalidSpec`."""
    try:
        spec.model_folder(Files.TEXT)
    except HubUnreachable as error:
        return f"how {spec.model} divides, since {error}"
    except ModelNotFetched as error:
        raise InvalidSpec(f"model: {error}") from error
    check_model(spec)
    check_model_files(spec, with_weights=False)
    return f"the weights of {spec.model}, which engines fetch" if needs_weights(spec) else ""

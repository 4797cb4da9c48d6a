"""The ranks of the application as clients see them, and requests that name the rank that must serve them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from baton.cluster.contracts import DirectorySnapshot, EngineClient, EngineRecord, EngineView, GatewayRecord

from ..errors import ApiError, bad_request
from .breaker import Breakers

PIN_HEADER = "X-data-parallel-rank"
MAX_DIGITS = 9  # of a rank


def pinned_rank(header: str | None, client: EngineClient) -> int | None:
    """Return the rank that a client demands in the header, or None.

    Raises `ApiError` (400) for a rank that this gateway does not reach now.
    """
    if header is None:
        return None
    reached = [view.record.rank for view in client.engines()]
    text = header.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS and int(text) in reached):
        raise _unreachable(text, reached)
    return int(text)


def _unreachable(text: str, reached: Sequence[int]) -> ApiError:
    shown = f"{text[:32]!r}"
    message = f"{shown} is not a rank that this gateway reaches: {spell_ranks(reached) or 'it reaches none now'}."
    return bad_request(PIN_HEADER, message, "unknown_rank")


def reachable(client: EngineClient, rank: int | None) -> Sequence[EngineView]:
    """Return the engines that a request may use: all, or only those that can serve it together with `rank`."""
    return client.engines() if rank is None else only_with(client.engines(), rank)


def only_with(engines: Sequence[EngineView], rank: int) -> list[EngineView]:
    """Return the engine of this rank, and the engines of the complementary role."""
    pinned = next((view for view in engines if view.record.rank == rank), None)
    if pinned is None:
        return []
    complement = pinned.record.role.complement
    return [view for view in engines if view is pinned or (complement is not None and view.record.role is complement)]


def rank_table(gateway_id: str, client: EngineClient, breakers: Breakers) -> dict[str, Any]:
    """Return all ranks, with the state of those that this gateway reaches; serving gateways; and starting groups."""
    snapshot = client.listed()
    serving = [record for record in snapshot.gateways if record.is_serving]
    views = {view.record.key: view for view in client.engines()}
    return {
        "object": "list",
        "gateway": gateway_id,
        "data": [_rank(record, views.get(record.key), breakers) for record in snapshot.engines],
        "gateways": [_gateway(record, snapshot) for record in sorted(serving, key=_place)],
        "starting": [msgspec.structs.asdict(group) for group in snapshot.starting],
    }


def _rank(record: EngineRecord, view: EngineView | None, breakers: Breakers) -> dict[str, Any]:
    return msgspec.structs.asdict(record) | {
        "epoch": f"{record.epoch:016x}",  # a string, because 63 bits exceed JavaScript's exact integers
        "reachable": view is not None,
        "circuit": breakers.state(record),
        "outstanding": 0 if view is None else view.outstanding,
        "num_running": None if view is None else view.num_running,
        "stats": None if view is None else view.stats,
        "reads_from": [] if view is None or view.transfers is None else view.transfers.lanes,
    }


def _gateway(record: GatewayRecord, snapshot: DirectorySnapshot) -> dict[str, Any]:
    return {
        "gateway": record.identity,
        "load_balancing": record.reach.mode,
        "node_ip": record.node_ip,
        "host": record.host,
        "port": record.port,
        "pid": record.pid,
        "ranks": [engine.rank for engine in snapshot.engines if record.reach.includes(engine)],
    }


def _place(record: GatewayRecord) -> tuple[str, int, str]:
    return record.node_ip, record.port, record.identity


def spell_ranks(ranks: Iterable[int]) -> str:
    """Return `[0, 1, 2, 5]` as "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

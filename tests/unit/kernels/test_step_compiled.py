"""The step's kernels compile for an H200."""

from __future__ import annotations

import importlib

import pytest

from baton.kernels.step import PIECE, REJECTED

from ...helpers.aot import compile_for_h200
from .step_cases import BLOCK_SIZE, GROUPS

pytestmark = pytest.mark.exhaustive
COMPILED: list[tuple[str, dict[str, str], dict[str, object]]] = [
    (
        "inputs._apply_writes",
        {"memory": "*i32", "pieces": "*i64", "values": "*i32", "num_pieces": "*i32", "writers": "i32"},
        {"BLOCK": PIECE},
    ),
    (
        "draws._store_tokens",
        {
            **dict.fromkeys(("tokens", "computed", "rows", "samples", "seq_lens", "pages", "turn"), "*i32"),
            **dict.fromkeys(("drawn", "index", "entries"), "*i64"),
            **dict.fromkeys(("count", "tokens_stride", "num_pages", "page_stride"), "i32"),
        },
        {"AGAIN": True, "BLOCK": PIECE},
    ),
    (
        "draws._place_drafts",
        {
            **dict.fromkeys(("tokens", "computed", "guesses", "first_guess", "rows", "query_start"), "*i32"),
            **dict.fromkeys(("samples", "draw_start", "draw_rows", "draw_positions"), "*i32"),
            **dict.fromkeys(("num_draws", "num_seqs", "tokens_stride", "width"), "i32"),
            "draw_tokens": "*i64",
        },
        {"BLOCK": 128},
    ),
    (
        "draws._accept_again",
        {
            **dict.fromkeys(("tokens", "computed", "guesses", "first_guess", "rows", "draw_start"), "*i32"),
            **dict.fromkeys(("seq_lens", "pages", "turn"), "*i32"),
            **dict.fromkeys(("count", "max_drafts", "tokens_stride", "width", "num_pages", "page_stride"), "i32"),
            **dict.fromkeys(("drawn", "index"), "*i64"),
        },
        {"NOT_ACCEPTED": REJECTED, "BLOCK": PIECE},
    ),
    (
        "draws._accept_tokens",
        {
            **dict.fromkeys(("tokens", "computed", "rows", "query_start", "samples", "draw_start"), "*i32"),
            **dict.fromkeys(("pages", "turn"), "*i32"),
            **dict.fromkeys(("num_seqs", "max_drafts", "tokens_stride", "num_pages", "page_stride"), "i32"),
            "drawn": "*i64",
        },
        {"NOT_ACCEPTED": REJECTED, "BLOCK": PIECE},
    ),
    (
        "inputs._replay_states",
        {
            **dict.fromkeys(("table", "computed", "applied", "rows", "query_start", "num_decodes"), "*i32"),
            **dict.fromkeys(("sources", "targets", "replay_rows", "replay_starts", "replay_counts"), "*i32"),
            **dict.fromkeys(("num_seqs", "table_stride"), "i32"),
        },
        {"entry_tokens": 512, "BLOCK": 128},
    ),
    (
        "inputs._chunk_inputs",
        {
            **dict.fromkeys(("tokens", "blocks", "computed", "rows", "query_start", "token_ids"), "*i32"),
            **dict.fromkeys(("positions", "slots", "last_tokens"), "*i64"),
            **dict.fromkeys(("seq_lens", "table_rows"), "*i32"),
            **dict.fromkeys(("num_tokens", "num_seqs", "token_programs"), "i32"),
            **dict.fromkeys(("tokens_stride", "blocks_stride", "group_stride", "slots_stride"), "i32"),
        },
        {"block_size": BLOCK_SIZE, "GROUPS": GROUPS, "BLOCK": 128},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "signature", "constexprs"), COMPILED, ids=[case[0] for case in COMPILED])
def test_the_kernels_compile_for_an_h200(name: str, signature: dict[str, str], constexprs: dict[str, object]) -> None:
    pytest.importorskip("triton")
    module, _, kernel = name.partition(".")
    gpu = importlib.import_module(f"baton.kernels.step.gpu.{module}")
    compile_for_h200(getattr(gpu, kernel), signature, constexprs, num_warps=4)

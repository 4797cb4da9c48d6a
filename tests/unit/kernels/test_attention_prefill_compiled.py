"""The prefill kernels, compiled for an H200."""

from __future__ import annotations

import pytest

from ...helpers.aot import compile_for_h200

pytestmark = pytest.mark.exhaustive

POINTERS = {"out": "*bf16", "items": "*i32", "block_tables": "*i32"}
NUMBERS = {"layer": "i32", "window": "i32", "num_heads": "i32", "score_unit": "fp32", "cap_scale": "fp32"}
TILE = {"sinks": None, "k_scale": None, "v_scale": None, "BLOCK_SIZE": 16}


def tile_signature(cache: str) -> dict[str, str]:
    strides = ("q_token", "q_head", "out_token", "out_head", "block", "head", "layer", "table")
    types = {**POINTERS, **NUMBERS, "q": "*bf16", "kv": f"*{cache}", "num_tiles": "*i32", "to_value": "i32:16"}
    return types | {f"{name}_stride": "i32:16" for name in strides}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("cache", ["bf16", "fp8e4nv"])
def test_tiles_are_loaded_16_bytes_at_a_time_and_multiplied_by_warp_groups(rows: int, cache: str) -> None:
    pytest.importorskip("triton")
    from baton.kernels.attention.gpu.prefill_tiles import attend_tile

    constants = {"GROUP": 4, "PACK": 4, "ROWS": rows, "KEYS": 64, "DIM": 128, "PADDED_DIM": 128}
    constants |= {"VALUE_DIM": 128, "PADDED_VALUE_DIM": 128, "TOKEN_STRIDE": 128}
    constants |= {**TILE, "HAS_WINDOW": False, "HAS_CAP": False}
    kernel = compile_for_h200(attend_tile, tile_signature(cache), constants, num_warps=rows // 16, num_stages=3)
    assert kernel.wgmma
    assert kernel.widest_load_bytes == 16


@pytest.mark.slow
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("cache", ["bf16", "fp8e4nv"])
def test_tiles_of_wide_heads_with_windows_and_caps_spill_little(rows: int, cache: str) -> None:
    pytest.importorskip("triton")
    from baton.kernels.attention.gpu.prefill_tiles import attend_tile

    constants = {"GROUP": 2, "PACK": 2, "KEYS": 32, "DIM": 256, "PADDED_DIM": 256, "HAS_WINDOW": True, "HAS_CAP": True}
    constants |= {"VALUE_DIM": 256, "PADDED_VALUE_DIM": 256, "TOKEN_STRIDE": 256}
    options = {"num_warps": rows // 16, "num_stages": 2, "max_spill_bytes": 64}
    kernel = compile_for_h200(attend_tile, tile_signature(cache), {**TILE, "ROWS": rows, **constants}, **options)
    assert kernel.wgmma
    assert kernel.widest_load_bytes == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "dim", "value_dim", "rows", "keys", "spill_bytes"),
    [
        ("bf16", 192, 128, 128, 32, 0),
        ("fp8e4nv", 192, 128, 128, 32, 0),
        ("bf16", 512, 512, 64, 16, 128),
        ("fp8e4nv", 512, 512, 64, 16, 320),
    ],
)
def test_tiles_of_heads_of_512_and_of_keys_wider_than_values_fit_a_multiprocessor(
    cache: str, dim: int, value_dim: int, rows: int, keys: int, spill_bytes: int
) -> None:
    pytest.importorskip("triton")
    from baton.kernels.attention.gpu.prefill_tiles import attend_tile

    padded = 1 << (dim - 1).bit_length()
    stride = dim if dim == value_dim else dim + value_dim
    constants = {"GROUP": 2, "PACK": 2, "KEYS": keys, "DIM": dim, "PADDED_DIM": padded}
    constants |= {"VALUE_DIM": value_dim, "PADDED_VALUE_DIM": value_dim, "TOKEN_STRIDE": stride}
    constants |= {**TILE, "ROWS": rows, "HAS_WINDOW": False, "HAS_CAP": False}
    options = {"num_warps": 8, "num_stages": 2, "max_spill_bytes": spill_bytes}
    kernel = compile_for_h200(attend_tile, tile_signature(cache), constants, **options)
    assert kernel.wgmma
    assert kernel.shared_bytes < 227 * 1024


BOXES = "swizzle_byte_width={}, element_bitwidth={}, rank={}, transposed=False, fp4_padded=False, cga_layout=[]"


def boxes(*shape: int, dtype: str = "bf16") -> str:
    """Return the type of a tensor descriptor with boxes of this shape, for TMA."""
    bits = 8 if dtype == "fp8e4nv" else 16
    layout = BOXES.format(shape[-1] * bits // 8, bits, len(shape))
    return f"tensordesc<{dtype}[{','.join(map(str, shape))}],NVMMASharedLayout({layout})>"


WIDE_HEADS = {"DIM": 256, "KEYS": 64, "HAS_WINDOW": True, "HAS_CAP": True, "STORED_TILES": 2}


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["bf16", "fp8e4nv"])
@pytest.mark.parametrize("options", [{}, {"HAS_WINDOW": True}, {"HAS_CAP": True}, {"DIM": 64}, WIDE_HEADS], ids=str)
def test_on_hopper_pages_are_copied_in_boxes_and_little_spills(options: dict[str, int], cache: str) -> None:
    pytest.importorskip("triton")
    from baton.kernels.attention.gpu.prefill_hopper import attend_pages

    constants = {"sinks": None, "PACK": 4, "KEYS": 128, "DIM": 128, "BLOCK_SIZE": 16}
    constants |= {"HAS_WINDOW": False, "HAS_CAP": False, "STORED_TILES": 3, **options}
    signature = {**POINTERS, **NUMBERS, "tile_count": "*i32", "queue": "*i32", "num_kv_heads": "i32"}
    signature |= {"num_layers": "i32"} | {f"{name}_stride": "i32:16" for name in ("token", "head", "table")}
    signature |= {"queries": boxes(16, 4, 64)}
    if cache == "bf16":
        signature |= {"pages": boxes(16, 64)}
        constants |= {"k_scale": None, "v_scale": None}
    else:
        signature |= {
            "pages": boxes(16, min(constants["DIM"], 128), dtype=cache),
            "k_scale": "*fp32",
            "v_scale": "*fp32",
        }
    kernel = compile_for_h200(attend_pages, signature, constants, max_spill_bytes=144, num_warps=4)
    assert kernel.wgmma
    assert "cp.async.bulk.tensor.2d" in kernel.ptx
    assert "setmaxnreg" in kernel.ptx
    assert "cvt.bf16.f16" not in kernel.ptx, "a conversion at a quarter of the rate of those by way of float32"


@pytest.mark.slow
def test_on_hopper_keys_of_192_dimensions_fit_shared_memory() -> None:
    pytest.importorskip("triton")
    from baton.kernels.mla.gpu.dense_hopper import attend_rows

    signature = dict.fromkeys(("items", "tile_count", "queue", "key_start"), "*i32") | {"out": "*bf16"}
    signature |= {"score_unit": "fp32", "num_heads": "i32", "token_stride": "i32:16", "head_stride": "i32:16"}
    signature |= {"queries": boxes(64, 1, 64), "rows": boxes(128, 64), "rope_rows": boxes(128, 64)}
    constants = {"NOPE": 128, "ROPE": 64, "VALUE": 128, "KEYS": 128}
    assert compile_for_h200(attend_rows, signature, constants, max_spill_bytes=128, num_warps=4).wgmma

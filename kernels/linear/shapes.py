"""The linear layers of the models that Baton is measured with: what `bench` shows and `tuning` tunes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """A layer and what a decoder puts around it."""

    name: str
    columns: int  # of the result
    depth: int
    gated: bool = False
    norm: bool = False
    add: bool = False

    @property
    def weight_rows(self) -> int:
        return 2 * self.columns if self.gated else self.columns


LAYERS = (
    LayerShape("0.6b qkv", 4096, 1024, norm=True),
    LayerShape("0.6b o", 1024, 2048, add=True),
    LayerShape("0.6b gate_up", 3072, 1024, gated=True, norm=True),
    LayerShape("0.6b down", 1024, 3072, add=True),
    LayerShape("0.6b head", 151936, 1024),
    LayerShape("8b qkv", 6144, 4096, norm=True),
    LayerShape("8b o", 4096, 4096, add=True),
    LayerShape("8b gate_up", 12288, 4096, gated=True, norm=True),
    LayerShape("8b down", 4096, 12288, add=True),
    LayerShape("8b head", 151936, 4096),
    LayerShape("30b qkv", 5120, 2048, norm=True),
    LayerShape("30b o", 2048, 4096, add=True),
    LayerShape("30b head", 151936, 2048),
    LayerShape("dsv2-lite q, latents", 3648, 2048, norm=True),
    LayerShape("dsv2-lite o", 2048, 2048, add=True),
    LayerShape("dsv2-lite router", 64, 2048),
    LayerShape("dsv2-lite shared gate_up", 2816, 2048, gated=True),
    LayerShape("dsv2-lite shared down", 2048, 2816, add=True),
    LayerShape("dsv2-lite head", 102400, 2048),
)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

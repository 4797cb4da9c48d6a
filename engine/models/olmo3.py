"""OLMo 3 (arXiv:2512.13961)."""

from __future__ import annotations

from baton.engine.hf_config.attention import AttentionForm, QKNorm, WindowRule
from baton.engine.hf_config.layer_caches import keys_and_values

from . import Family
from .olmo2 import Olmo2Layer


class Olmo3Layer(Olmo2Layer):
    """The layer of OLMo 2; all but every fourth have a window, and only those without one stretch their rope."""


FAMILY = Family(
    architecture="Olmo3ForCausalLM",
    layer=Olmo3Layer,
    cache=keys_and_values,
    attention=AttentionForm(qk_norm=QKNorm.WIDTH),
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500_000.0},
    windows=WindowRule(listed=True, pattern=4, own_rope=True),
)

"""DeepSeek-V3 and R1 (arXiv:2412.19437)."""

from __future__ import annotations

from .deepseek_v2 import DeepseekV2ForCausalLM


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """As V2; its experts are chosen by corrected sigmoids (`hf_config.experts`)."""

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """The layers behind the last one predict further tokens, which nobody asks for."""
        first, count = self.config.num_layers, self.config.num_draft_layers
        return (*super().ignored_tensors, *(f"model.layers.{first + index}.*" for index in range(count)))

"""The router's own product, whose result keeps float32: rounded logits would send tokens to other experts."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.linear.gpu import Method, fitting_method, linear, options_for


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `baton.kernels.moe.router_logits`."""
    num_tokens, depth = x.shape
    num_experts = weight.shape[0]
    options = options_for(num_tokens, num_experts, depth, x.device, gated=False)
    if fitting_method(options, x, weight) is Method.LIBRARY:
        logits = torch.mm(x, weight.T, out_dtype=torch.float32)
        return logits if bias is None else logits.add_(bias)
    out = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=x.device)
    return linear(x, weight, bias, norm=None, add_to=None, out=out, gated=False, options=options)

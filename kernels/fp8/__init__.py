"""Linear layers over weights in E4M3, the 8-bit floating-point format with a range of 448 (arXiv:2209.05433).

    weight    [N, K] float8_e4m3fn, with float32 scales: one a row [N], or one a block of 128 x 128 [N / 128, K / 128]
    x [T, K]  is brought to 8 bits on the way in, scaled by its largest value: of each token where the weight has a
              scale a row; of each group of 128 values of a token where it has one a block

Value = stored * scale. Products are summed in float32 and rounded once, to the type of x.
"""

import torch

from .layer import gated_linear, linear
from .weight import BLOCK, Fp8Weight, dequantize, quantize_weight

__all__ = ["BLOCK", "Fp8Weight", "dequantize", "gated_linear", "has_gpu_kernels", "linear", "quantize_weight"]


def has_gpu_kernels(device: torch.device) -> bool:
    """Whether `device` multiplies 8-bit floating-point numbers itself: Ada, Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)

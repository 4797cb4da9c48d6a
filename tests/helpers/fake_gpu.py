"""Import this first in a script whose Triton kernels target an H200 that is not there: launches are only recorded."""

FAKE_GPU = """
import torch
import triton
from triton.backends.compiler import GPUTarget

class Device:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_active_torch_device(self): return torch.device("cpu")

triton.runtime.driver.set_active(Device())
"""

"""Checkpoints to parameters: streamed tensor by tensor, with an exact account. Importing this package loads no torch.

checkpoint   what lies in a folder's safetensors files, from their headers
quantized    the weight method of each layer of a quantized checkpoint
loader       the account, then the stream; or random weights instead, the same for the same seed
progress     a bar for loads that take long
"""

from .checkpoint import Checkpoint, TensorEntry
from .progress import Progress, loading_bar

__all__ = ["Checkpoint", "Progress", "TensorEntry", "loading_bar"]

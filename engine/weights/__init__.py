"""Checkpoints to parameters: streamed tensor by tensor, with an exact account. Importing this package loads no torch.

quantized    the weight method of each layer of a quantized checkpoint
loader       the account, then the stream; or random weights instead, the same for the same seed
progress     a bar for loads that take long
"""

from .progress import Progress, loading_bar

__all__ = ["Progress", "loading_bar"]

"""Multi-head latent attention on a GPU.

cache             norm, rotations, the write into the KV cache
attention         which of the two forms serves which tokens of a step
work              absorbed: which program reads what, worked out on the device once a step
absorbed          attention in the space of the latents: decodes, and chunks of any length in a captured graph
absorbed_hopper   the same for sequences of one query token, in Gluon
parts             what becomes of its sums: results, or parts of sequences that several programs share
few               the matrices of `UpProjection` for a few tokens
combine           such parts, added up by a kernel of its own
expanded          keys and values spelt out for long prompts
gather            latents from their pages, row after row
dense             attention over them, where the kernel of `attention.gpu.dense_hopper` does not serve
"""

from .attention import mla_attention, prepare
from .cache import latent_and_cache

__all__ = ["latent_and_cache", "mla_attention", "prepare"]

"""Split-KV attention: the arithmetic that puts the parts of one result together, shared by attention and MLA.

Programs that share the keys of a sequence leave a part each: sums of values, sums of weights and the top scores that
both are relative to. Scores are in units of log 2, since the device's exponential has base 2.
"""

from __future__ import annotations

import math

import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(-1.0e38)  # below any score, yet finite: it can be subtracted from itself

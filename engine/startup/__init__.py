"""Start-up, from arguments to an engine that is ready to serve. Reads downwards:

model_config.py  names of the Hub become folders, before any rank starts; config.json is read and checked
build.py       build_engine: the rank that schedules; follow: a tensor-parallel rank that does not; loaded_member:
               every rank reads config.json, starts compiling, joins the group, loads
load.py        kernels, weights, KV blocks, runner: the same order on every device
cpu.py         these four steps on a CPU
cuda.py        these four steps on a GPU: profile runs, compilation ahead, captured graphs
device.py      the device of this process, and what a kind of device has to implement
step_sizes.py  how many requests and tokens a step has where the arguments do not say
kv_cache.py    how many KV blocks fit, and where they lie
arenas.py      how cache groups divide the memory for blocks
phases.py      how long each phase took

Importing this package loads no torch: that is a phase of its own, which `loaded_member` overlaps with other processes.
"""

from .build import Engine, build_engine, follow

__all__ = ["Engine", "build_engine", "follow"]

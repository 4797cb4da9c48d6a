"""Start-up, from arguments to an engine that is ready to serve. Reads downwards:

model_config.py   names on the Hub become folders, before any rank starts; config.json is read and checked
build.py          build_engine: the rank that schedules; follow: a tensor-parallel rank that does not; start_member:
                  every rank reads config.json, starts compiling, joins the group, loads
load.py           kernels, weights, KV blocks, runner: in the same order on every device
cpu.py            these four steps on a CPU
cuda.py           these four steps on a GPU: profile runs, compilation ahead, captured graphs
device.py         what a rank is started with (RankContext), and what each kind of device implements (DeviceStartup)
division.py       whether the model can be divided over the ranks
step_sizes.py     the number of requests and tokens in a step, if the arguments do not say
weight_counts.py  how many bytes a rank's weights take, and whether they fit
memory.py         the memory of a rank's device, as measured or as planned
kv_size.py        how many KV blocks there are, and the longest sequence that they hold: one rule, also of plans
kv_cache.py       allocates the KV blocks
arenas.py         how cache groups divide the memory for blocks
phases.py         how long each phase took

Importing this package does not load torch: that is a phase of its own, which `start_member` runs while other processes
work.
"""

from .build import Engine, build_engine, follow

__all__ = ["Engine", "build_engine", "follow"]

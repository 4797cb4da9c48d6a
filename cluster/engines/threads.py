"""How many threads a worker computes with."""

from __future__ import annotations

import os

from .launch import EngineLaunch

# A team that sleeps between two ops of a step is late for each (half the speed, measured); one that spins for longer
# than that takes cores from others. This many spins are some tens of microseconds.
OPENMP_SPINS = "20000"


def configure_threads(launch: EngineLaunch, num_nodes: int) -> None:
    """Sets this process's OpenMP threads. Must come before torch is loaded, which reads the variables once.

    By default the cores are shared out among the application's workers, which are taken to be spread evenly over the
    nodes: teams that outnumber the cores starve each other.
    """
    config = launch.spec.engine_config(launch.role)
    workers_here = -(-launch.spec.num_workers // num_nodes)
    threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) // workers_here)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["GOMP_SPINCOUNT"] = OPENMP_SPINS
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

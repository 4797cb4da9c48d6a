"""Processes that are there at once: forked from one that has made the large imports already, before any thread.

    process = FORKING.Process(target=function_of_a_module, args=(...), daemon=True)

They have the environment of whoever started the first of them: what is another process's own goes in as an argument.
"""

from __future__ import annotations

import multiprocessing

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    [
        "torch",
        "numpy",
        "baton.engine.startup.build",
        "baton.kv_transfer.connector",
        "baton.cluster.gateway",
        "baton.cluster.ingress.gateway_server",
    ]
)

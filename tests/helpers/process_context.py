"""Fast process starts: forks of a server process that has the large imports, and no threads yet.

    process = FORKING.Process(target=function_of_a_module, args=(...), daemon=True)

All of them have the environment of the process that started the first one: pass other values as arguments.
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

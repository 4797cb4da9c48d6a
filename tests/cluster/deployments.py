"""A one-machine Ray cluster that deploys Serve config files: `python -m tests.cluster.deployments`.

Each line on stdin names a file, which is deployed as by `serve deploy`; the process ends with stdin. Prints the
cluster's address, and a line for each file. SIGUSR1 makes it print where its threads are.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path

import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    memory = 80 * 2**20
    ray.init("local", num_cpus=8, object_store_memory=memory, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    print(ray.get_runtime_context().gcs_address, flush=True)
    for line in sys.stdin:
        config = ServeDeploySchema.model_validate(yaml.safe_load(Path(line.strip()).read_text()))
        _get_global_client().deploy_apps(config)
        print("deployed", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

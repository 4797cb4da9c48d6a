"""A Ray cluster of several nodes on one machine: `python -m tests.cluster.several_nodes RESOURCE ...`.

Besides the head there is a node for each RESOURCE, which also has the resource `decode_node`. Prints the cluster's
address. Each line on stdin names a resource whose node is killed; the process ends with stdin.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20


def main(resources: list[str]) -> None:
    options: dict[str, Any] = {"num_cpus": 2, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    nodes = {
        name: cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES, resources={name: 1.0, "decode_node": 1.0})
        for name in resources
    }
    print(cluster.address, flush=True)
    for line in sys.stdin:
        cluster.remove_node(nodes[line.strip()], allow_graceful=False)
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])

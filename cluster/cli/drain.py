"""What `baton drain` does: asks the application's directory, through Ray, to let a group of engines go."""

from __future__ import annotations

import logging
import os

from rich.console import Console

from baton.cluster.gateway.ranks import spell_ranks

from .local import RAY_ENVIRONMENT


def drain_rank(rank: int, app: str, ray_address: str) -> int:
    """Returns the exit code."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    from baton.cluster.membership.directory import NAMESPACE, directory_name
    from baton.cluster.membership.members import NoSuchRank

    console = Console()
    try:
        ray.init(ray_address, logging_level=logging.ERROR, log_to_driver=False)
        directory = ray.get_actor(directory_name(app), namespace=NAMESPACE)
        ranks: list[int] = ray.get(directory.drain_rank.remote(rank))
    except ConnectionError as error:
        console.print(f"[red]error:[/] no Ray cluster at {ray_address}: {error}", highlight=False)
        return 1
    except NoSuchRank as error:
        console.print(f"[red]error:[/] {str(error).splitlines()[-1]}", highlight=False)
        return 1
    except ValueError:
        console.print(
            f"[red]error:[/] the cluster runs no application named {app!r}: see `serve status`, and give --app"
        )
        return 1
    finally:
        ray.shutdown()
    console.print(f"rank {spell_ranks(ranks)}: it drains; Serve then starts another group in its place")
    return 0

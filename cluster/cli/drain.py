"""What `baton drain` does: asks the application's directory, through Ray, to let a group of engines go."""

from __future__ import annotations

import typer

from baton.cluster.gateway.routing.ranks import spell_ranks

from .cli_common import fail
from .ray_cluster import NoRayCluster, connect, leave


def drain_rank(rank: int, app: str, ray_address: str) -> None:
    """Ends the command with 1 where there is no such cluster, application or rank."""
    try:
        connect(ray_address)
    except NoRayCluster as error:
        fail(str(error), code=1)
    import ray

    from baton.cluster.membership.directory import NAMESPACE, directory_name
    from baton.cluster.membership.members import NoSuchRank

    try:
        directory = ray.get_actor(directory_name(app), namespace=NAMESPACE)
        ranks: list[int] = ray.get(directory.drain_rank.remote(rank))
    except NoSuchRank as error:
        fail(str(error).splitlines()[-1], code=1)
    except ValueError:
        fail(f"the cluster runs no application named {app!r}: see `serve status`, and give --app", code=1)
    finally:
        leave()
    typer.echo(f"rank {spell_ranks(ranks)}: it drains; Serve then starts another group in its place")

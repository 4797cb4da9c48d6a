"""Where gateways belong, and at which ports.

A post is a place where a gateway belongs: a node, or a rank on its node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from baton.cluster.contracts import EngineRecord, LoadBalancing, Reach


@dataclass(frozen=True)
class Post:
    """A place where a gateway belongs."""

    reach: Reach
    node_id: str
    node_ip: str

    @property
    def name(self) -> str:
        rank = f"-rank-{self.reach.rank}" if self.reach.mode is LoadBalancing.EXTERNAL else ""
        return f"{self.node_id}{rank}"


def posts_for(mode: LoadBalancing, engines: Iterable[EngineRecord]) -> dict[str, Post]:
    """Where gateways belong, by name, in the order of the ranks that they are for."""
    posts: dict[str, Post] = {}
    for engine in engines:
        if engine.role.writes_answers:
            external = mode is LoadBalancing.EXTERNAL
            reach = Reach(mode=mode, rank=engine.rank) if external else Reach(mode=mode, node_id=engine.node_id)
            post = Post(reach, engine.node_id, engine.node_ip)
            posts.setdefault(post.name, post)
    return posts


class Ports:
    """Gateways of one machine listen at `first`, `first + 1`, ...; those of different machines at the same ports."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._taken: dict[str, dict[int, str]] = defaultdict(dict)  # by machine: port to post

    def of(self, post: Post) -> int:
        """The post's port: the one that it had, else the lowest that none of its machine has."""
        taken = self._taken[post.node_ip]
        port = next((port for port, name in taken.items() if name == post.name), None)
        if port is None:
            port = self._first
            while port in taken:
                port += 1
            taken[port] = post.name
        return port

    def hold(self, post: Post, port: int) -> None:
        """A gateway of an earlier keeper listens there."""
        self._taken[post.node_ip][port] = post.name

    def free(self, post: Post) -> None:
        taken = self._taken[post.node_ip]
        for port in [port for port, name in taken.items() if name == post.name]:
            del taken[port]

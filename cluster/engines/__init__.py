"""One engine group: the replica that starts and watches it, the actors of its ranks, the server of each engine."""

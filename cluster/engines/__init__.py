"""One engine group: the replica that places and watches it, the actors of its ranks, the server gateways talk to."""

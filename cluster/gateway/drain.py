"""How a gateway leaves: balancers are told first, then the port is closed, then open answers end."""

from __future__ import annotations


class Drain:
    """SERVING ──begin──> DRAINING

    While it drains, `/health` says 503 and every answer closes its connection, but requests are taken as before:
    a balancer sends some until its next check. Closing the port afterwards is the HTTP server's part.
    """

    def __init__(self) -> None:
        self.has_begun = False

    def begin(self) -> None:
        """Beginning twice changes nothing."""
        self.has_begun = True

"""How a socket notices that the machine at its other end, or the way there, is lost: nobody says goodbye then.

Both ends send pings, and libzmq's own thread answers them, however busy Python is in that process. A connection over
which nothing came for `silence_s` is ended, as if the other end had closed it.
"""

from __future__ import annotations

from typing import Any

import zmq

SILENCE_S = 1.8  # by default: a decision takes under 2 s
SHORTEST_S = 0.5  # threads of a busy machine may wait for their turn so long
BEATS = 5  # pings in that time


def notice_silence(socket: zmq.Socket[Any], silence_s: float) -> None:
    """Comes before the socket binds or connects. libzmq counts from a ping on, so that is the first of `BEATS`."""
    silence_ms = round(silence_s * 1000)
    beat_ms = silence_ms // BEATS
    socket.setsockopt(zmq.HEARTBEAT_IVL, beat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence_ms - beat_ms)
    socket.setsockopt(zmq.TCP_MAXRT, silence_ms)  # where so much is unsent that no ping goes out any more

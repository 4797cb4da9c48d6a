"""The chart's probes, run against a raylet and a gateway that answer, hang or have ended."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ...helpers.charts import example


class Answers(BaseHTTPRequestHandler):
    hangs = False

    def do_GET(self) -> None:
        if self.hangs:
            time.sleep(20)  # in a daemon thread
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Hangs(Answers):
    hangs = True


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("raylet", "gateway", "alive"),
    [
        (Answers, Answers, True),
        (Answers, None, True),  # the gateway has not started, or is restarting
        (Answers, Hangs, False),
        (None, Answers, False),
        (Hangs, None, False),
    ],
)
def test_a_gateways_pod_is_alive_unless_its_raylet_is_gone_or_its_gateway_hangs(
    raylet: type[Answers] | None, gateway: type[Answers] | None, alive: bool
) -> None:
    python, *words, script = example("cpu-demo").groups["gateway"].container["livenessProbe"]["exec"]["command"]
    assert (python, script.count("timeout=4")) == ("python", 2)
    servers = []
    for port, handler in ((52365, raylet), (8000, gateway)):
        if handler is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                there = free.getsockname()[1]
        else:
            servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
            there = servers[-1].server_port
        patience_s = 1 if handler is Hangs else 8  # on a busy machine answers are late
        script, asked = re.subn(rf"(127\.0\.0\.1:){port}(/.*timeout=)4", rf"\g<1>{there}\g<2>{patience_s}", script)
        assert asked == 1
    try:
        done = subprocess.run([sys.executable, *words, script], capture_output=True, timeout=30)
    finally:
        for server in servers:
            server.shutdown()
    assert (done.returncode == 0) == alive, done.stderr

"""Layouts, settings and waits for the tests of connectors."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.engine.core.layout import KVLayout
from baton.kv_transfer.connector import TransferSettings

SMALL = KVLayout(model="small", num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16")  # 32 KB a block
QUICK = TransferSettings(lease_s=3.0, margin_s=0.2, retry_s=0.2, connect_s=2.0)


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)

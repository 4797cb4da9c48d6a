"""Tests over the IPv6 loopback."""

from __future__ import annotations

from pathlib import Path

import pytest

_SWITCH = Path("/proc/sys/net/ipv6/conf/lo/disable_ipv6")

needs_ipv6 = pytest.mark.skipif(
    not _SWITCH.exists() or _SWITCH.read_text().strip() != "0",
    reason="this machine has no IPv6 loopback (net.ipv6.conf.lo.disable_ipv6)",
)

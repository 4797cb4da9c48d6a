"""host:port, with IPv6 addresses in brackets."""

from __future__ import annotations

import pytest

from baton.engine.net.sockets import endpoint, is_ipv6_url, split_endpoint


@pytest.mark.parametrize(
    ("host", "port", "written"),
    [("10.0.0.1", 80, "10.0.0.1:80"), ("::1", 8000, "[::1]:8000"), ("fe80::1%eth0", 1, "[fe80::1%eth0]:1")],
)
def test_what_is_written_reads_as_it_was(host: str, port: int, written: str) -> None:
    assert endpoint(host, port) == written
    assert split_endpoint(written) == (host, port)
    assert is_ipv6_url(f"tcp://{written}") == (":" in host)


def test_a_port_may_be_a_wildcard() -> None:
    assert endpoint("::", "*") == "[::]:*"


@pytest.mark.parametrize(
    "given", ["", "host", "host:", ":80", "host:http", "host:-1", "::1:80", "[::1]", "[host]:80", "[::1:80"]
)
def test_what_is_no_endpoint_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"not host:port, such as 10.0.0.1:80 or \[fd00::1\]:80"):
        split_endpoint(given)

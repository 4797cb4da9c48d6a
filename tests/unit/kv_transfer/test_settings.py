"""Settings that cannot work are refused with what to change."""

from __future__ import annotations

import pytest
import yaml

from baton.kv_transfer.protocol.messages import DigestMode, EngineKey, Granted, LeaseKey, ReaderKey, decode, encode
from baton.kv_transfer.settings import InvalidTransferSettings, TransferSettings, parse_settings


def test_the_defaults_are_valid() -> None:
    assert TransferSettings().timeouts.margin_s == TransferSettings().margin_s


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lease_s": 0.0}, "lease_s is 0.0; it must be a positive number"),
        ({"lease_s": 86401.0}, "lease_s is 86401; it must be at most 86400 seconds"),
        ({"silence_s": 0.2}, "silence_s is 0.2; it must be at least 0.5 seconds"),
        ({"retry_s": float("nan")}, "retry_s is nan"),
        ({"stall_s": 1.0}, "stall_s is 1; it must be at least 2 seconds"),
        ({"stall_s": float("inf")}, "stall_s is inf; it must be"),
        ({"stall_s": 5.0, "silence_s": 6.0}, r"and silence_s \(6\): a peer that is lost is to be noticed first"),
        ({"lease_s": 1.0, "margin_s": 0.5}, "leave no time to renew"),
        ({"renew_at": 1.0}, "leave no time to renew"),
        ({"reads_in_flight": 0}, "must be at least 1"),
        ({"backends": ()}, "backends must name one"),
        ({"cpu_affinity": ""}, "cpu_affinity is ''"),
        ({"cpu_affinity": "near"}, "it must be 'device', 'any' or a list of CPUs like '0-7,16'"),
        ({"cpu_affinity": "3-1"}, "3-1 is no CPU, or CPUs, from 0 to 8191"),
        ({"cpu_affinity": "0-9999999"}, "0-9999999 is no CPU, or CPUs, from 0 to 8191"),
    ],
)
def test_impossible_settings_are_refused(change: dict, reason: str) -> None:
    with pytest.raises(InvalidTransferSettings, match=reason):
        TransferSettings(**change)


def test_the_longest_lease_that_may_be_set_is_one_that_peers_read() -> None:
    lease_s = 86400.0
    lease, reader = LeaseKey(EngineKey("p", 1), "r", 0, 1), ReaderKey(EngineKey("d", 1), 1)
    granted = Granted(lease, reader, 1, TransferSettings(lease_s=lease_s).lease_s, 1)
    assert decode(encode(granted)) == granted


def test_the_name_that_both_ends_compare_has_nixls_backends_in_any_order() -> None:
    assert TransferSettings(backends=("UCX", "POSIX")).transport_name == "nixl/POSIX+UCX"
    assert TransferSettings(backends=("POSIX", "UCX", "UCX")).transport_name == "nixl/POSIX+UCX"
    assert TransferSettings(transport="ucx", backends=("POSIX",)).transport_name == "ucx"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"transport": "tcp"}, "transport is 'tcp'; it must be one of 'nixl', 'ucx'"),
        ({"digest": "sha"}, "digest is 'sha'; it must be one of 'off', 'verify'"),
        ({"buffer": "gpu"}, "buffer is 'gpu'; it must be one of 'device', 'host', 'auto'"),
        ({"progressive": "sometimes"}, "Expected `bool`, got `str` - at `$.progressive`"),
        ({"lease_s": -1}, "lease_s is -1.0; it must be a positive number"),
    ],
)
def test_a_file_that_says_what_cannot_be_is_told_what_can(values: dict, reason: str) -> None:
    with pytest.raises(InvalidTransferSettings) as refused:
        parse_settings(values)
    assert reason in str(refused.value)


def test_off_may_be_written_without_quotes_in_yaml() -> None:
    written = yaml.safe_load("{digest: off, progressive: off}")
    assert parse_settings(written) == TransferSettings(progressive=False)
    assert parse_settings({"digest": "verify"}).digest is DigestMode.VERIFY

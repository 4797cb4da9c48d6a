"""Settings that cannot work are refused with what to change."""

from __future__ import annotations

import pytest
import yaml
from pydantic import ValidationError

from baton.engine.strict_model import describe
from baton.kv_transfer.protocol.messages import DigestMode, EngineKey, Granted, LeaseKey, ReaderKey, decode, encode
from baton.kv_transfer.settings import TransferSettings


def test_the_defaults_are_valid() -> None:
    assert TransferSettings().timeouts.margin_s == TransferSettings().margin_s


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lease_s": 0.0}, "lease_s: is 0.0, must be above 0"),
        ({"lease_s": -1}, "lease_s: is -1, must be above 0"),
        ({"lease_s": 86401.0}, "lease_s: is 86401.0, must be at most 86400"),
        ({"lease_s": "long"}, "lease_s: is 'long', must be a number"),
        ({"lease_s": None}, "lease_s: is empty, must be a number"),
        ({"heartbeat_timeout_s": 0.2}, "heartbeat_timeout_s: is 0.2, must be at least 0.5"),
        ({"retry_s": float("nan")}, "retry_s: is nan, must be a finite number"),
        ({"stall_s": 1.0}, "stall_s: is 1.0, must be at least 2"),
        ({"stall_s": float("inf")}, "stall_s: is inf, must be a finite number"),
        (
            {"stall_s": 5.0, "heartbeat_timeout_s": 6.0},
            "stall_s: is 5, must be at least heartbeat_timeout_s (6): a lost peer must be detected first",
        ),
        (
            {"lease_s": 1.0, "margin_s": 0.5},
            "lease_s: is 1, and with renew_at 0.5 leaves no time to renew before margin_s (0.5) and retry_s (0.5): "
            "raise lease_s, or lower renew_at, margin_s or retry_s",
        ),
        ({"renew_at": 1.0}, "renew_at: is 1.0, must be below 1"),
        ({"reads_in_flight": 0}, "reads_in_flight: is 0, must be at least 1"),
        ({"reads_in_flight": True}, "reads_in_flight: is true, must be a number"),
        ({"batch_bytes": 0}, "batch_bytes: is 0, must be at least 1"),
        ({"buffer_bytes": 0}, "buffer_bytes: is 0, must be at least 1"),
        ({"backends": []}, "backends: is a list, must have at least 1 item"),
        ({"backends": "UCX"}, "backends: is 'UCX', must be a list"),
        ({"cpu_affinity": ""}, "cpu_affinity: is ''"),
        ({"cpu_affinity": "near"}, "must be 'device', 'any' or a list of CPUs like '0-7,16'"),
        ({"cpu_affinity": "3-1"}, "3-1 is not a CPU or a range of CPUs from 0 to 8191"),
        ({"cpu_affinity": "0-9999999"}, "0-9999999 is not a CPU or a range of CPUs from 0 to 8191"),
        ({"transport": "tcp"}, "transport: is 'tcp', must be 'nixl' or 'ucx'"),
        ({"digest": "sha"}, "digest: is 'sha', must be 'off' or 'verify'"),
        ({"buffer": "gpu"}, "buffer: is 'gpu', must be 'device', 'host' or 'auto'"),
        ({"progressive": "sometimes"}, "progressive: is 'sometimes', must be true or false"),
        ({"lease": 3}, "lease: is unknown; did you mean 'lease_s'?"),
    ],
)
def test_impossible_settings_are_refused_with_what_was_given_and_what_is_allowed(change: dict, reason: str) -> None:
    with pytest.raises(ValidationError) as refused:
        TransferSettings.model_validate(change)
    assert reason in describe(refused.value)


def test_the_longest_lease_that_may_be_set_is_one_that_peers_read() -> None:
    lease_s = 86400.0
    lease, reader = LeaseKey(EngineKey("p", 1), "r", 0, 1), ReaderKey(EngineKey("d", 1), 1)
    granted = Granted(lease, reader, 1, TransferSettings(lease_s=lease_s).lease_s, 1)
    assert decode(encode(granted)) == granted


def test_the_name_that_both_ends_compare_has_nixls_backends_in_any_order() -> None:
    assert TransferSettings(backends=("UCX", "POSIX")).transport_name == "nixl/POSIX+UCX"
    assert TransferSettings(backends=("POSIX", "UCX", "UCX")).transport_name == "nixl/POSIX+UCX"
    assert TransferSettings(transport="ucx", backends=("POSIX",)).transport_name == "ucx"


def test_off_may_be_written_without_quotes_in_yaml() -> None:
    written = yaml.safe_load("{digest: off, progressive: off}")
    assert TransferSettings.model_validate(written) == TransferSettings(progressive=False)
    assert TransferSettings.model_validate({"digest": "verify"}).digest is DigestMode.VERIFY

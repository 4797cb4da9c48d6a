"""How soon a thread that moves blocks looks again. What a transport does is only known by asking it."""

from __future__ import annotations

POLL_READS_S = 1e-4  # while reads run, at most ...
POLL_READS_SHARE = 0.1  # ... and sooner while they are young: at intervals of this share of their age
POLL_GPU_READS_S = 0.0  # ... but at once those of a GPU's memory: over NVLink 100 us are 40 MB
POLL_SERVING_S = 1e-3  # while someone may read us: some lanes need our CPU
POLL_IDLE_S = 60.0


def pause_s(now: float, reading_since: float | None, *, device: str, warming: bool, serving: bool) -> float | None:
    """Seconds until the transport should be asked again; None: not before something happens.

    `reading_since`: when the youngest read began, if one runs. `device`: see `KVRegion`.
    """
    if reading_since is not None:
        longest = POLL_READS_S if device == "cpu" else POLL_GPU_READS_S
        return min(longest, POLL_READS_SHARE * (now - reading_since))
    if warming:
        return POLL_READS_S
    return POLL_SERVING_S if serving else None

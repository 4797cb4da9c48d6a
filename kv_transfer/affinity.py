"""Pin a transfer thread to CPUs: for a GPU to those of its NUMA node, near the memory that the thread polls and copies.

A PCI device's NUMA node is in `/sys`. Threads that a transport starts later inherit the CPUs.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from baton.engine.strict_model import MOST_CPUS

logger = logging.getLogger(__name__)

NEAR_DEVICE = "device"
ANY_CPU = "any"
SYS = Path("/sys")


def pin_thread(affinity: str, device: str) -> None:
    """Pin the calling thread to `affinity` (`TransferSettings.cpu_affinity`). If that is refused, only warn."""
    if affinity == ANY_CPU:
        return
    cpus = cpus_near(device) if affinity == NEAR_DEVICE else parse_cpus(affinity)
    if cpus is None:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        logger.warning("the transfer thread stays on all CPUs: %s are refused (%s)", sorted(cpus), error.strerror)
    else:
        logger.info("the transfer thread runs on CPUs %s", sorted(os.sched_getaffinity(0)))


def cpus_near(device: str, sys: Path = SYS) -> set[int] | None:
    """Return the CPUs of a GPU's NUMA node. None: the device is a CPU, or the node is not known."""
    if not device.startswith("cuda"):
        return None
    import torch

    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the PCI fields
    return cpus_of_pci(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0", sys)


def cpus_of_pci(address: str, sys: Path = SYS) -> set[int] | None:
    """Return the CPUs of the NUMA node of the PCI device at `address`, such as `0000:1b:00.0`. None: not known."""
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        return parse_cpus((sys / f"devices/system/node/node{node}/cpulist").read_text().strip())
    except (OSError, ValueError) as error:  # a machine with one node reports node -1
        logger.info("the NUMA node of PCI device %s is not known: %s", address, error)
        return None


def parse_cpus(text: str) -> set[int]:
    """Parse a set of CPUs as Linux writes it, such as `0-3,8`. Raises `ValueError`."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        named = range(int(first), int(last or first) + 1)
        if not named or not 0 <= named[0] <= named[-1] < MOST_CPUS:
            raise ValueError(f"{part.strip()} is not a CPU or a range of CPUs from 0 to {MOST_CPUS - 1}")
        cpus.update(named)
    return cpus

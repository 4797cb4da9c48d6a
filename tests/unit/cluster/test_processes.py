"""Orphans that a command has adopted. The test needs its own process, since adoption cannot be undone."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)

REAPS = """
import os, subprocess, time
from pathlib import Path
from baton.cluster.cli.processes import adopt_orphans, children, reap_orphans

def wait_for_end(pid):
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)

adopt_orphans()
reap_orphans(children())  # there are none
child = subprocess.Popen(["sleep", "60"])
own = children()
for _ in range(2):
    shell = subprocess.run(["sh", "-c", "sleep 0.1 > /dev/null & echo $!"], stdout=subprocess.PIPE, check=True)
    orphan = int(shell.stdout)
    wait_for_end(orphan)
    reap_orphans(own)
    print(Path(f"/proc/{orphan}").exists())
child.kill()
wait_for_end(child.pid)
reap_orphans(own)
print(child.wait())
"""


def test_ended_orphans_are_reaped_and_children_are_left_to_their_owner() -> None:
    done = subprocess.run([sys.executable, "-c", REAPS], capture_output=True, text=True, timeout=30)
    assert (done.stdout.split(), done.stderr) == (["False", "False", "-9"], "")

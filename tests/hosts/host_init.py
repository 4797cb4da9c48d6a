"""The first process of a host, which reaps orphans as an init does: `python host_init.py NAME`.

Prints a line when it runs. When it ends, the kernel ends every process of the host.
"""

from __future__ import annotations

import os
import signal


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    print("ready", flush=True)
    while True:
        signal.sigwait({signal.SIGCHLD})
        while any_ended():
            pass


def any_ended() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


if __name__ == "__main__":
    main()

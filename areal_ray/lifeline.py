"""Helper processes die with the actor that owns them, however it dies.

vLLM runs its engine in a process of its own, and rewards run in others. When the actor is
killed, nobody is left to stop them, and they keep their memory and their GPU for ever. So each
of them holds on to the owner's pid and ends itself as soon as the owner is gone. One that is
stopped (SIGSTOP, a debugger) can't: if it is the owner's own child, the kernel does it instead.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading

OWNER_PID = "AREAL_RAY_OWNER_PID"
PR_SET_PDEATHSIG = 1


def claim_ownership() -> None:
    """Called in the owner, before it starts a helper: its children inherit the variable."""
    os.environ[OWNER_PID] = str(os.getpid())


def die_with_owner() -> None:
    """Called in a helper: end with the owner. Does nothing without one."""
    owner = os.environ.get(OWNER_PID)
    if owner is None or int(owner) == os.getpid():
        return
    if os.getppid() == int(owner):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        handle = os.pidfd_open(int(owner))
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_wait_and_exit, args=(handle,), name="lifeline", daemon=True).start()


def _wait_and_exit(owner: int) -> None:
    select.select([owner], [], [])
    os._exit(1)

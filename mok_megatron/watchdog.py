"""A thread that raises a peer's fatal fault also when Python is blocked outside of this package.

While a rank computes elsewhere, or waits in another library's collective for a rank that is gone, nobody looks at the flags. The thread does:
on a peer's time-out or failure it raises in the main thread, and where that cannot run Python it prints the message and ends the process.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

from mok_megatron.errors import MoKError, MoKPeerError
from mok_megatron.rendezvous import name_members

if TYPE_CHECKING:
    from mok_megatron.workspace import MoKWorkspace

POLL_SECONDS = 0.25
# A blocked main thread gets this long to take the exception before the process is ended.
GRACE_SECONDS = 5.0
EXIT_CODE = 74

_watched: "weakref.WeakSet[MoKWorkspace]" = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(workspace: "MoKWorkspace") -> None:
    """Look at a workspace's flags from now on."""
    global _thread
    if workspace.ep_size == 1 and workspace.device.type == "cpu":
        return
    with _lock:
        _watched.add(workspace)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="mok_megatron.watchdog", daemon=True)
            _thread.start()


def unwatch(workspace: "MoKWorkspace") -> None:
    with _lock:
        _watched.discard(workspace)


def find_fault(workspace: "MoKWorkspace") -> MoKError | None:
    """A fatal fault, a peer's or of this rank's kernels, that this rank has not raised yet."""
    if workspace.device.type == "cuda":
        from mok_megatron.device_calls import device_fault

        return device_fault(workspace)
    protocol = workspace.protocol
    for peer in range(workspace.ep_size):
        if peer == workspace.rank:
            continue
        fault = protocol.fatal_fault(peer)
        if fault is not None:
            who = name_members(workspace.members, [workspace.rank, peer])
            return MoKPeerError(f"rank {workspace.rank}: rank {peer} is lost: {fault.text}" + (f" ({who})" if who else ""), peer=peer)
    return None


def _raise_in_main_thread(workspace: "MoKWorkspace", fault: MoKError) -> None:
    def instantiate(self: MoKError) -> None:
        # Runs when the main thread takes the exception.
        workspace.failure_raised = True
        RuntimeError.__init__(self, str(fault))
        self.__dict__.update(fault.__dict__)

    # The interpreter raises a class, not an instance, from another thread.
    error = type(type(fault).__name__, (type(fault),), {"__init__": instantiate})
    ident = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error))


def _run() -> None:
    deadlines: dict[int, tuple[float, MoKError]] = {}
    while True:
        time.sleep(POLL_SECONDS)
        with _lock:
            workspaces = list(_watched)
        for workspace in workspaces:
            if workspace.in_call or workspace.failure_raised:
                # Waits inside a call look at the flags themselves.
                deadlines.pop(id(workspace), None)
                continue
            fault = find_fault(workspace)
            if fault is None:
                continue
            if id(workspace) not in deadlines:
                deadlines[id(workspace)] = (time.monotonic() + GRACE_SECONDS, fault)
                workspace.fail(fault)
                _raise_in_main_thread(workspace, fault)
                if workspace.device.type == "cuda":
                    from mok_megatron.device_calls import tell_peers

                    tell_peers(workspace, fault)
            elif time.monotonic() > deadlines[id(workspace)][0]:
                with contextlib.suppress(Exception):
                    print(
                        f"mok_megatron: {fault}; this process is blocked elsewhere and ends",
                        file=sys.stderr,
                        flush=True,
                    )
                os._exit(EXIT_CODE)

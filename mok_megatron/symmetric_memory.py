"""How the ranks of a group map each other's buffers: POSIX shared memory on the CPU, torch symmetric memory on GPUs."""

import contextlib
import mmap
import os
import socket
import uuid
from typing import Any

import torch

from mok_megatron.buffers import SymmetricBuffers, WorkspaceShape
from mok_megatron.errors import MoKArgumentError, MoKError, MoKUnsupportedError
from mok_megatron.rendezvous import gather


def _shared_memory(name: str, size: int, create: bool) -> torch.Tensor:
    """Map `size` bytes of POSIX shared memory as uint8."""
    path = os.path.join("/dev/shm", name)
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    try:
        if create:
            try:
                # Reserve now: writing to pages that do not exist would end the process with SIGBUS.
                os.posix_fallocate(descriptor, 0, size)
            except OSError as error:
                os.unlink(path)
                raise MoKArgumentError(
                    f"num_local_tokens: the symmetric buffers need {size} bytes of shared memory (/dev/shm), which failed: {error}"
                ) from error
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _own_memory(size: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.zeros(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise MoKArgumentError(f"num_local_tokens: the buffers need {size} bytes on {device}, which failed: {error}") from error


def map_host_buffers(shape: WorkspaceShape, group: Any, rank: int, timeout_seconds: float) -> list[SymmetricBuffers]:
    """Every rank's buffers in this process; zero when the group starts.

    Raises (on every rank):
        MoKArgumentError: shared memory is too small on some rank.
        MoKUnsupportedError: the group spans hosts.
        MoKTimeoutError: a rank did not come.
    """
    size = SymmetricBuffers.num_bytes(shape)
    if shape.ep_size == 1:
        return [SymmetricBuffers.from_memory(shape, _own_memory(size, torch.device("cpu")))]
    name, own, fault = f"mok_megatron_{uuid.uuid4().hex}", None, None
    names = [name]
    try:
        try:
            own = _shared_memory(name, size, create=True)
        except (MoKError, OSError) as error:
            fault = str(error)
        gathered = gather(group, (socket.gethostname(), name, fault), timeout_seconds, "sharing memory")
        names = [peer_name for _, peer_name, _ in gathered]
        faults = [f"rank {r}: {text}" for r, (_, _, text) in enumerate(gathered) if text is not None]
        if faults:
            raise MoKArgumentError("; ".join(faults))
        hosts = {host for host, _, _ in gathered}
        if len(hosts) > 1:
            raise MoKUnsupportedError(
                f"the expert-parallel group spans hosts {sorted(hosts)}: on the CPU its ranks must be processes of one host"
            )
        maps = [own if r == rank else _shared_memory(peer_name, size, create=False) for r, peer_name in enumerate(names)]
        gather(group, None, timeout_seconds, "mapping shared memory")
        names = [name]
    finally:
        # Mapped everywhere, or failed: nobody needs a name any more. After a failure a rank that died cannot remove its own.
        for each in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join("/dev/shm", each))
    return [SymmetricBuffers.from_memory(shape, memory) for memory in maps]


def map_device_buffers(shape: WorkspaceShape, group: Any, rank: int, device: torch.device, timeout_seconds: float) -> list[SymmetricBuffers]:
    """Every rank's buffers as this GPU's kernels address them; flags are zero. No multicast mapping is made or used.

    Raises:
        MoKUnsupportedError: on every rank, when the GPUs of the group cannot address each other's memory.
    """
    size = SymmetricBuffers.num_bytes(shape)
    if shape.ep_size == 1:
        return [SymmetricBuffers.from_memory(shape, _own_memory(size, device))]
    import torch.distributed._symmetric_memory as symmetric_memory

    handle, fault = None, None
    try:
        memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)
        handle = symmetric_memory.rendezvous(memory, group)
    except RuntimeError as error:
        fault = str(error)
    faults = [f"rank {r}: {text}" for r, text in enumerate(gather(group, fault, timeout_seconds, "sharing memory")) if text is not None]
    if faults:
        raise MoKUnsupportedError(f"the GPUs of the expert-parallel group cannot share memory: {'; '.join(faults)}")
    maps = [memory if r == rank else handle.get_buffer(r, (size,), torch.uint8) for r in range(shape.ep_size)]
    # Nobody stores a flag before everybody has zeroed its own: the gather above came after the zeroing.
    return [SymmetricBuffers.from_memory(shape, memory) for memory in maps]

"""How the ranks of a group meet before they share memory: bounded, and naming who did not come.

It goes through torch.distributed's store, not through a collective: a collective's wait ends by the process group's own time-out, half an hour
later and without saying which rank is missing.
"""

import collections
import dataclasses
import datetime
import os
import pickle
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mok_megatron.errors import MoKTimeoutError

_meetings: collections.Counter[str] = collections.Counter()


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of a group, as messages name it."""

    global_rank: int
    host: str
    process_id: int

    @classmethod
    def here(cls) -> "Member":
        global_rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return cls(global_rank, socket.gethostname(), os.getpid())

    def __str__(self) -> str:
        return f"global rank {self.global_rank}, process {self.process_id} on {self.host}"


def name_members(members: Sequence[Member], ranks: Sequence[int]) -> str:
    """'rank 1 is global rank 3, process 12 on host' for each of the group's ranks; empty where members are not known."""
    return "; ".join(f"rank {rank} is {members[rank]}" for rank in sorted(set(ranks)) if 0 <= rank < len(members))


def gather(group: Any, value: Any, timeout_seconds: float, purpose: str) -> list[Any]:
    """Every rank's value, in rank order; a collective call of the group.

    Args:
        group: the process group. value: anything that pickles. purpose: what the ranks meet for, for the message.

    Raises:
        MoKTimeoutError: names the ranks that did not come within timeout_seconds.
    """
    store, rank, ranks = _get_default_store(), dist.get_rank(group), dist.get_process_group_ranks(group)
    meeting = _meetings[group.group_name]
    _meetings[group.group_name] += 1

    def key(number: int, member: int) -> str:
        return f"mok_megatron/{group.group_name}/{number}/{member}"

    store.set(key(meeting, rank), pickle.dumps(value))
    started = time.monotonic()
    missing = []
    for member in range(len(ranks)):
        left = max(timeout_seconds - (time.monotonic() - started), 0.01)
        try:
            store.wait([key(meeting, member)], datetime.timedelta(seconds=left))
        except RuntimeError:
            missing.append(member)
    if missing:
        waited = time.monotonic() - started
        names = ", ".join(f"{member} (global rank {ranks[member]})" for member in missing)
        raise MoKTimeoutError(
            f"rank {rank} of {len(ranks)} (global rank {ranks[rank]}): rank(s) {names} missing; phase 'workspace', {purpose}; arrived "
            f"{len(ranks) - len(missing)} of {len(ranks)}; waited {waited:.1f} s, limit {timeout_seconds:g} s",
            rank=rank,
            missing_ranks=tuple(missing),
            layer=None,
            microbatch=None,
            phase="workspace",
            expected=len(ranks),
            arrived=tuple(int(member not in missing) for member in range(len(ranks))),
            waited_seconds=waited,
            limit_seconds=timeout_seconds,
        )
    values = [pickle.loads(store.get(key(meeting, member))) for member in range(len(ranks))]
    if meeting > 0:
        # Whoever came to this meeting has read the last one.
        store.delete_key(key(meeting - 1, rank))
    return values

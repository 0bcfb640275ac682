"""Protocol between the ranks of a group: per-peer flags with call numbers, refusal, and bounded waits.

Every schedule exchange and every pass is a *call*, numbered alike on all ranks. Each rank owns one row of flags for each peer, written by that
peer alone:

* ENTERED: the peer's inputs of this call are in place.
* DONE: the peer's last pull from me and last push to me of this call are complete. Stored by every pass to every peer, also to one with which
  no row was exchanged and by passes that only pull.
* SIGNATURE: which pass of which layer the peer entered; a difference means that ranks run different programs.
* three status records: two for refusals (the call failed on the peer; the group stays usable), by parity of the call, since a rank that is
  through with a refused call may refuse the next one while a slow peer still looks at the first; one for a fatal fault.

A rank pulls from or pushes to a peer only after that peer's ENTERED reached the call; a pass ends when DONE of all peers did. Nobody is ever
more than one pass ahead, so the buffers are free at the next entry.
"""

import dataclasses
import enum
import time
from collections.abc import Generator, Sequence
from typing import NamedTuple
from typing import Protocol as TypingProtocol

import torch

from mok_megatron import ops
from mok_megatron.errors import MoKArgumentError, MoKError, MoKPeerError, MoKTimeoutError
from mok_megatron.rendezvous import Member, name_members

TEXT_BYTES = 2048


class Flag(enum.IntEnum):
    """Words of a peer's row that waits look at."""

    ENTERED = 0
    DONE = 1
    SIGNATURE = 2


class StatusWord(enum.IntEnum):
    """Words of a status record."""

    CALL = 0
    CODE = 1
    MISSING = 2  # bit mask of ranks that a timed-out peer misses
    LENGTH = 3


STATUS_RECORDS = 3
FATAL_RECORD = 2
ROW_WORDS = len(Flag) + STATUS_RECORDS * len(StatusWord)


def fatal_status_words() -> slice:
    """Words of the fatal record in a peer's row."""
    at = len(Flag) + FATAL_RECORD * len(StatusWord)
    return slice(at, at + len(StatusWord))


class StatusCode(enum.IntEnum):
    REFUSED = 1  # this call only
    TIMED_OUT = 2  # fatal from here on
    FAILED = 3  # fatal from here on
    OVERFLOW = 4  # fatal, from kernels only: MISSING holds the rows needed, LENGTH those available


class CallKind(enum.IntEnum):
    FORWARD = 0
    RECOMPUTE = 1
    BACKWARD = 2
    SCHEDULE = 3
    RESIZE = 4  # no pass: the group agrees to make another workspace


@dataclasses.dataclass(frozen=True)
class PassTag:
    """Where a call stands in the model, for messages: layer number and microbatch."""

    layer: int | None = None
    microbatch: int | None = None

    def __post_init__(self) -> None:
        for name in ("layer", "microbatch"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise MoKArgumentError(f"{name}={value!r} of a PassTag: must be None or an integer that is not negative")

    def __str__(self) -> str:
        layer = "unknown" if self.layer is None else str(self.layer)
        microbatch = "unknown" if self.microbatch is None else str(self.microbatch)
        return f"layer {layer}, microbatch {microbatch}"


class Wait(TypingProtocol):
    """Something that a worker waits for."""

    def ready(self) -> bool:
        """Whether the wait is over. Raises when it never will be."""


Steps = Generator[Wait | None, None, None]


_SIGNATURE_LAYER_BITS = 20
_SIGNATURE_KIND_BITS = 4


def _signature(call: int, kind: CallKind, tag: PassTag) -> int:
    layer = 0 if tag.layer is None else (tag.layer + 1) % (1 << _SIGNATURE_LAYER_BITS)
    return (((call << _SIGNATURE_KIND_BITS) | kind) << _SIGNATURE_LAYER_BITS) | layer


def _describe_signature(signature: int) -> str:
    layer = signature % (1 << _SIGNATURE_LAYER_BITS)
    kind = CallKind((signature >> _SIGNATURE_LAYER_BITS) % (1 << _SIGNATURE_KIND_BITS))
    return f"{kind.name.lower()} of layer {'unknown' if layer == 0 else layer - 1}"


@dataclasses.dataclass
class FlagMemory:
    """Flags of one rank: int64 [EP, ROW_WORDS] and the peers' messages, uint8 [EP, STATUS_RECORDS, TEXT_BYTES]. Row p is rank p's to write."""

    words: torch.Tensor
    texts: torch.Tensor


class FatalFault(NamedTuple):
    """What a peer says of the call that ended the group for it."""

    call: int
    code: StatusCode
    text: str
    missing: tuple[int, ...]
    """The ranks that it waited for in vain."""


class GroupProtocol:
    """One rank's side of the protocol.

    Args:
        rank: in the group.
        flags: FlagMemory of every rank, this one's included.
        call_number: int64 [1], the number of the last finished call. It lives in memory that a replayed launch reads again, never in an
            argument of a launch.
        members: the processes of the group, for messages; empty where they are not known.
    """

    def __init__(self, rank: int, flags: Sequence[FlagMemory], call_number: torch.Tensor, members: Sequence[Member] = ()) -> None:
        self.rank = rank
        self.members = members
        self.ep_size = len(flags)
        self.flags = flags
        self._call_number = call_number

    @property
    def call(self) -> int:
        """Number of the call that runs now, or would run next."""
        return ops.load_flag(self._call_number, 0) + 1

    def advance(self) -> None:
        """End of a call: the last worker out makes the next call's number current."""
        ops.store_flag(self._call_number, 0, self.call)

    def _store(self, peer: int, word: int, value: int) -> None:
        ops.store_flag(self.flags[peer].words, self.rank * ROW_WORDS + word, value)

    def _load(self, peer: int, word: int) -> int:
        return ops.load_flag(self.flags[self.rank].words, peer * ROW_WORDS + word)

    def signal_entered(self, call: int, kind: CallKind, tag: PassTag) -> None:
        for peer in range(self.ep_size):
            self._store(peer, Flag.SIGNATURE, _signature(call, kind, tag))
            self._store(peer, Flag.ENTERED, call)

    def signal_done(self, call: int) -> None:
        for peer in range(self.ep_size):
            self._store(peer, Flag.DONE, call)

    def publish_status(self, call: int, code: StatusCode, text: str, missing: Sequence[int] = ()) -> None:
        """Tell every peer that this call failed here."""
        record = call % 2 if code == StatusCode.REFUSED else FATAL_RECORD
        at = len(Flag) + record * len(StatusWord)
        data = torch.frombuffer(bytearray(text.encode()[:TEXT_BYTES] or b" "), dtype=torch.uint8)
        for peer in range(self.ep_size):
            self.flags[peer].texts[self.rank, record, : len(data)] = data
            self._store(peer, at + StatusWord.LENGTH, len(data))
            self._store(peer, at + StatusWord.MISSING, sum(1 << rank for rank in missing))
            self._store(peer, at + StatusWord.CODE, code)
            # Readers look at the call first.
            self._store(peer, at + StatusWord.CALL, call)

    def arrived(self, flag: Flag, peer: int, call: int) -> bool:
        """Whether a peer's flag has reached the call."""
        return self._load(peer, flag) >= call

    def arrivals(self, flag: Flag) -> tuple[int, ...]:
        """What each peer's flag says."""
        return tuple(self._load(peer, flag) for peer in range(self.ep_size))

    def refusal(self, peer: int, call: int) -> str | None:
        """A peer's message if it refused this call."""
        record = call % 2
        if self._load(peer, len(Flag) + record * len(StatusWord) + StatusWord.CALL) != call:
            return None
        return self._text(peer, record)

    def fatal_fault(self, peer: int) -> FatalFault | None:
        at = len(Flag) + FATAL_RECORD * len(StatusWord)
        call = self._load(peer, at + StatusWord.CALL)
        if call == 0:
            return None
        mask = self._load(peer, at + StatusWord.MISSING)
        missing = tuple(rank for rank in range(self.ep_size) if mask >> rank & 1)
        return FatalFault(call, StatusCode(self._load(peer, at + StatusWord.CODE)), self._text(peer, FATAL_RECORD), missing)

    def _text(self, peer: int, record: int) -> str:
        length = self._load(peer, len(Flag) + record * len(StatusWord) + StatusWord.LENGTH)
        return bytes(self.flags[self.rank].texts[peer, record, :length].tolist()).decode(errors="replace")

    def check_signature(self, peer: int, call: int, kind: CallKind, tag: PassTag) -> None:
        """Raise when a peer that entered this call runs another pass or layer in it."""
        theirs = self._load(peer, Flag.SIGNATURE)
        mine = _signature(call, kind, tag)
        shift = _SIGNATURE_LAYER_BITS + _SIGNATURE_KIND_BITS
        # A peer may already have entered the next call and overwritten its signature; then there is nothing to compare.
        if theirs >> shift == call and theirs != mine:
            raise MoKError(
                f"rank {self.rank} runs {_describe_signature(mine)} as call {call} of the group, but rank {peer} runs "
                f"{_describe_signature(theirs)}: all ranks of an expert-parallel group must run the same passes in the same order"
            )


@dataclasses.dataclass
class CallState:
    """A running call: what its waits need to explain themselves."""

    protocol: GroupProtocol
    call: int
    kind: CallKind
    tag: PassTag
    limit_seconds: float
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return f"{self.kind.name.lower()} of {self.tag} (call {self.call})"

    def fatal_fault(self, peer: int) -> FatalFault | None:
        """A peer's fatal fault, in this call or an earlier one.

        A peer that fails in a later call is through with this one: it has seen every rank arrive, so this rank will too. Its fault belongs to
        that later call here as well, however slow this rank is.
        """
        fault = self.protocol.fatal_fault(peer)
        return fault if fault is not None and fault.call <= self.call else None

    def check_peers(self, flag: Flag) -> None:
        """Raise when a peer refused this call or is lost, while a flag is waited for."""
        for peer in range(self.protocol.ep_size):
            if peer != self.protocol.rank:
                self._check_peer(peer, flag)

    def _check_peer(self, peer: int, flag: Flag) -> None:
        where = f"rank {self.protocol.rank}, {self.name}"
        fault = self.fatal_fault(peer)
        if fault is not None:
            if fault.code == StatusCode.TIMED_OUT and self.protocol.rank not in fault.missing:
                raise self.timeout_error(flag, fault.missing, f"rank {peer} reports: {fault.text}")
            verb = "gave up waiting for this rank" if fault.code == StatusCode.TIMED_OUT else "failed"
            raise MoKPeerError(f"{where}: rank {peer} {verb}: {fault.text}{self.who([peer])}", peer=peer)
        refusal = self.protocol.refusal(peer, self.call)
        if refusal is not None:
            raise MoKPeerError(f"{where}: rank {peer} refused it: {refusal}{self.who([peer])}", peer=peer)

    def who(self, ranks: Sequence[int]) -> str:
        """Which processes these ranks of the group are, and this one, for the end of a message."""
        names = name_members(self.protocol.members, [self.protocol.rank, *ranks])
        return f" ({names})" if names else ""

    def timeout_error(self, flag: Flag, missing: Sequence[int], detail: str = "") -> MoKTimeoutError:
        arrivals = self.protocol.arrivals(flag)
        waited = time.monotonic() - self.started
        seen = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(arrivals))
        count = sum(value >= self.call for value in arrivals)
        message = (
            f"rank {self.protocol.rank} of {self.protocol.ep_size}: rank(s) {', '.join(map(str, missing))} missing in "
            f"{self.kind.name.lower()} of {self.tag}; phase '{flag.name.lower()}', expected call {self.call} of "
            f"{self.protocol.ep_size} ranks, arrived {count} ({seen}); waited {waited:.1f} s, limit {self.limit_seconds:g} s{self.who(missing)}"
        )
        return MoKTimeoutError(
            f"{message}; {detail}" if detail else message,
            rank=self.protocol.rank,
            missing_ranks=tuple(missing),
            layer=self.tag.layer,
            microbatch=self.tag.microbatch,
            phase=flag.name.lower(),
            expected=self.call,
            arrived=arrivals,
            waited_seconds=waited,
            limit_seconds=self.limit_seconds,
        )


@dataclasses.dataclass
class FlagWait:
    """Wait until a flag of each of the peers has reached the call."""

    state: CallState
    flag: Flag
    peers: Sequence[int]

    def ready(self) -> bool:
        protocol, call = self.state.protocol, self.state.call
        # Loads are ordered: a peer stores its status before its flag, so a status that belongs to an arrived flag is seen here.
        ready = all(protocol.arrived(self.flag, peer, call) for peer in self.peers)
        self.state.check_peers(self.flag)
        if ready and self.flag == Flag.ENTERED:
            for peer in self.peers:
                protocol.check_signature(peer, call, self.state.kind, self.state.tag)
        return ready

    def missing(self) -> tuple[int, ...]:
        """The peers to blame for a flag that is not there; none if it is.

        Where DONE is waited for, those that did not even enter, if there are such. The others may live and be held up by just these: a pull
        or a push waits for the peer's ENTERED, and whoever exchanges no row with the lost rank comes here, to DONE, before them. Once all
        have entered nobody is held up by anybody, and who is not done is at fault.
        """
        waited_for = self._not_at(self.flag, self.peers)
        return (self._not_at(Flag.ENTERED, waited_for) if self.flag == Flag.DONE else ()) or waited_for

    def _not_at(self, flag: Flag, peers: Sequence[int]) -> tuple[int, ...]:
        return tuple(peer for peer in peers if not self.state.protocol.arrived(flag, peer, self.state.call))


def poll(wait: FlagWait, limit_seconds: float) -> None:
    """Block until a wait is over.

    Raises:
        MoKTimeoutError: it was not within the limit.
        MoKPeerError: a peer refused or failed.
    """
    start = time.monotonic()
    delay = 0.0
    while not wait.ready():
        if time.monotonic() - start > limit_seconds and (missing := wait.missing()):  # none: the last flag came since
            raise wait.state.timeout_error(wait.flag, missing)
        # Ranks may share cores: yield at once, then back off to a millisecond.
        time.sleep(delay)
        delay = min(1e-3, delay * 2 + 1e-6)

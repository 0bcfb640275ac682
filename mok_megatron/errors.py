"""Exceptions of the package. Every message names the argument or rank, its value and the rule that it breaks."""


class MoKError(RuntimeError):
    """Base of all errors that this package raises on purpose."""


class MoKArgumentError(MoKError, ValueError):
    """An argument breaks a rule. Raised on every rank of the group, before anything is launched."""


class MoKUnsupportedError(MoKError):
    """A feature that was asked for is not supported: names the flag and the reason."""


class MoKBuildError(MoKError, ImportError):
    """The compiled library is missing or does not fit what it meets."""


class MoKCapacityError(MoKError):
    """More rows arrive at a rank than its schedule can hold. No row was dropped or written.

    Attributes: rank (in the group), needed_rows and available_rows (padded).
    """

    def __init__(self, message: str, *, rank: int, needed_rows: int, available_rows: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.needed_rows = needed_rows
        self.available_rows = available_rows


class MoKPeerError(MoKError):
    """Another rank refused a call or failed in it; the text carries that rank's own message.

    Attributes: peer (rank in the group).
    """

    def __init__(self, message: str, *, peer: int) -> None:
        super().__init__(message)
        self.peer = peer


class MoKTimeoutError(MoKError):
    """A rank did not come. The workspace cannot be used any more.

    Attributes: rank and missing_ranks (in the group), layer and microbatch (None when the caller gave no tag), phase, expected and arrived
    (flag values), waited_seconds, limit_seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        missing_ranks: tuple[int, ...],
        layer: int | None,
        microbatch: int | None,
        phase: str,
        expected: int,
        arrived: tuple[int, ...],
        waited_seconds: float,
        limit_seconds: float,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.missing_ranks = missing_ranks
        self.layer = layer
        self.microbatch = microbatch
        self.phase = phase
        self.expected = expected
        self.arrived = arrived
        self.waited_seconds = waited_seconds
        self.limit_seconds = limit_seconds

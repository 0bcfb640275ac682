"""The rows of the benchmark, one file each."""

from mok_megatron.bench.rows.bare import BareRow
from mok_megatron.bench.rows.base import Row
from mok_megatron.bench.rows.deepep import DeepEPRow
from mok_megatron.bench.rows.hybridep import HybridEPRow
from mok_megatron.bench.rows.ligercute import LigerCuteRow
from mok_megatron.bench.rows.mok import MoKAloneRow, MoKBf16GradRow, MoKContextRow, MoKRow, MoKScheduleRow
from mok_megatron.bench.rows.nccl import NcclRow
from mok_megatron.bench.rows.replay import MoKRepeatedRow, MoKReplayRow
from mok_megatron.bench.rows.sonicmoe import SonicMoERow

_DEFAULT = (MoKRow, MoKBf16GradRow, MoKContextRow, NcclRow, HybridEPRow, DeepEPRow, SonicMoERow, LigerCuteRow, BareRow)
COMPETITORS: dict[str, type[Row]] = {row.name: row for row in (*_DEFAULT, MoKReplayRow)}
DEFAULT_ROWS = tuple(row.name for row in _DEFAULT)

__all__ = ["COMPETITORS", "DEFAULT_ROWS", "MoKAloneRow", "MoKRepeatedRow", "MoKReplayRow", "MoKRow", "MoKScheduleRow", "Row"]

"""The rows of the benchmark, one file each."""

from mok_megatron.bench.rows.bare import BareRow
from mok_megatron.bench.rows.base import Row
from mok_megatron.bench.rows.deepep import DeepEPRow
from mok_megatron.bench.rows.hybridep import HybridEPRow
from mok_megatron.bench.rows.ligercute import LigerCuteRow
from mok_megatron.bench.rows.mok import MoKAloneRow, MoKBf16GradRow, MoKContextRow, MoKRow, MoKScheduleRow
from mok_megatron.bench.rows.nccl import NcclRow
from mok_megatron.bench.rows.sonicmoe import SonicMoERow

COMPETITORS: dict[str, type[Row]] = {
    row.name: row for row in (MoKRow, MoKBf16GradRow, MoKContextRow, NcclRow, HybridEPRow, DeepEPRow, SonicMoERow, LigerCuteRow, BareRow)
}

__all__ = ["COMPETITORS", "MoKAloneRow", "MoKRow", "MoKScheduleRow", "Row"]

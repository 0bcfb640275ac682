"""F-T1: a rank that does not come is named by everybody else, in the exception itself, within the configured time."""

from __future__ import annotations

import time
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

from mok_megatron import MoKConfig
from tests.distributed import run_ranks_outcomes
from tests.megatron.helpers import build_layer, make_config, start_megatron, tokens

LIMIT = 5.0


class TwoLayers(torch.nn.Module):
    """Layers 0-based 0 and 1 are Megatron's 1 and 2."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        knobs = MoKConfig(timeout_seconds=LIMIT)
        self.layers = torch.nn.ModuleList(build_layer("mok", config, layer_number=i, knobs=knobs) for i in (1, 2))
        self.config = config
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, tensor: Any) -> None: ...

    def forward(self, x: torch.Tensor, fault: str | None) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == 1 and fault == "skips":
                return x
            if index == 1 and fault == "is late":
                time.sleep(2 * LIMIT)
            x = layer(x)[0]
        return x


def train(rank: int, fault: str) -> None:
    """Three microbatches in Megatron's own schedule; rank 2 has a fault at the second layer in microbatch 1."""
    start_megatron(4)
    config = make_config(4)
    config.grad_scale_func = config.timers = None
    model = TwoLayers(config)
    calls = iter(range(10))

    def forward_step(data: Any, model: torch.nn.Module) -> Any:
        faulty = next(calls) == 1 and rank == 2
        y = model(tokens((6, 1, 64), rank).requires_grad_(True), fault if faulty else None)
        return y, lambda output: (output.sum(), {"loss": output.sum().detach()})

    forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=None,
        model=model,
        num_microbatches=3,
        seq_length=6,
        micro_batch_size=1,
    )


def test_f_t1_hang_report() -> None:
    outcomes = run_ranks_outcomes(train, 4, "is late", timeout=90)
    for outcome in outcomes:
        assert outcome.status == "error", outcome.describe()
        assert outcome.exit_code != 0
    timeouts = [o for o in outcomes if "MoKTimeoutError" in o.error_types]
    assert [o.rank for o in timeouts] == [0, 1, 3]
    for outcome in timeouts:
        found = outcome.attributes
        assert (found["rank"], found["missing_ranks"]) == (outcome.rank, (2,))
        assert (found["layer"], found["microbatch"]) == (2, 1)
        assert found["limit_seconds"] == LIMIT
        # A rank may learn it from another one that began to wait a little earlier.
        assert 0.9 * LIMIT <= found["waited_seconds"] < LIMIT + 10
        text = outcome.message
        for words in (f"rank {outcome.rank}", "layer 2", "microbatch 1", "expected", "arrived", f"{LIMIT:g}"):
            assert words in text, (words, text)


def test_f_t1_a_rank_that_skips_a_layer_is_told_apart_at_once() -> None:
    """It comes to the group's next call with another pass, which nobody can wait out."""
    outcomes = run_ranks_outcomes(train, 4, "skips", timeout=90)
    for outcome in outcomes:
        assert outcome.status == "error" and outcome.exit_code != 0, outcome.describe()
        if outcome.rank != 2:
            assert "runs schedule of layer 2" in outcome.message, outcome.message
            assert "rank 2 runs backward of layer 1" in outcome.message, outcome.message

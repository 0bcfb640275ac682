"""The MoE layer whose routed experts are one MoK call.

T local tokens, K routes a token, H hidden (or the latent size), I expert intermediate, E_local local experts.
"""

from __future__ import annotations

import logging
import weakref
from argparse import Namespace
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from mok_megatron import functional
from mok_megatron.autograd import routed_experts
from mok_megatron.errors import MoKArgumentError
from mok_megatron.megatron import compat, router
from mok_megatron.megatron.dispatcher import MoKTokenDispatcher
from mok_megatron.megatron.experts import ExpertWeights, WeightReader, call_experts
from mok_megatron.megatron.metrics import LoadCounter
from mok_megatron.megatron.microbatch import MicrobatchMemory
from mok_megatron.megatron.settings import RunSettings

logger = logging.getLogger(__name__)


class MoKMoELayer(MoELayer):
    """A stock layer that has become a MoK layer (:func:`adopt`): router, shared expert and parameters are Megatron's.

    Overrides ``routed_experts_compute``; everything before and after it runs as in Megatron, through a dispatcher that moves nothing.
    """

    _mok_settings: RunSettings
    _mok_group: Any
    _mok_microbatches: MicrobatchMemory
    _mok_load: LoadCounter | None
    _mok_reader: WeightReader

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens [T, H] and router weights [T, K] fp32 to the combined output [T, H]; the bias is always None."""
        topk_experts, routing_map = self.token_dispatcher.take_routes()

        def compute(x: Tensor, router_weights: Tensor) -> Tensor:
            return self._mok_compute(x.contiguous(), router_weights, topk_experts, routing_map)

        return call_experts(self.experts, compute, hidden_states, probs), None

    def _mok_compute(self, x: Tensor, router_weights: Tensor, topk_experts: Tensor, routing_map: Tensor | None) -> Tensor:
        weights = self._mok_reader.read(self.experts, self.num_local_experts)
        in_backward = torch._C._current_graph_task_id() != -1
        tag = functional.PassTag(
            layer=self.layer_number,
            microbatch=self._mok_microbatches.of_forward(training=self.training, saves=torch.is_grad_enabled(), in_backward=in_backward),
        )
        config = self._mok_settings.config
        workspace = self._mok_workspace(x, weights)
        try:
            schedule = functional.build_schedule(workspace, config, topk_experts, tag=tag)
        except MoKArgumentError as error:
            reason = str(error)
            if x.shape[0] > workspace.num_local_tokens:
                reason += "; --mok-max-tokens-per-rank sets the most that a rank may bring"
            elif routing_map is not None:
                reason = router.describe_overfull_rows(routing_map, topk_experts.shape[1]) or reason
            raise MoKArgumentError(f"layer {self.layer_number}: {reason}") from error
        if self._mok_load is not None and self.training and not in_backward:
            self._mok_load.add(self.layer_number or 0, schedule.expert_rows)
        return routed_experts(config, workspace, schedule, x, router_weights, weights, tag=tag)

    def _mok_workspace(self, x: Tensor, weights: ExpertWeights) -> functional.MoKWorkspace:
        found = _last_workspaces.get(self)
        form = (x.device, x.dtype, x.shape[1], weights.intermediate_size)
        if found is not None and found[1] == form:
            workspace = found[0]
            if workspace.failure is None and workspace.buffers and x.shape[0] <= workspace.num_local_tokens:
                return workspace
        workspace = self._mok_find_workspace(x, weights)
        _last_workspaces[self] = workspace, form
        return workspace

    def _mok_find_workspace(self, x: Tensor, weights: ExpertWeights) -> functional.MoKWorkspace:
        settings = self._mok_settings
        tokens = settings.max_tokens_per_rank or tokens_per_rank(compat.training_args())
        key = (
            self._mok_group,
            x.device,
            x.dtype,
            x.shape[1],
            self.token_dispatcher.topk,
            self.num_local_experts,
            weights.intermediate_size,
            settings,
        )
        # The first call of the first layer makes it and the others find it, so that every rank of the group takes part in the
        # making at the same call, whatever number of tokens it brings there.
        workspace = _workspaces.get(key)
        # None yet, or closed. At EP 1 also after a failure: a restart within the process goes on with the layers that there are. In a group the
        # restart has new process groups, and a rank that goes on alone must be told at once.
        missing = workspace is None or not workspace.buffers or (workspace.failure is not None and self._mok_group is None)
        if not missing and tokens is None and self._mok_group is None:
            missing = x.shape[0] > workspace.num_local_tokens  # nobody to agree with: it may grow
        if missing:
            workspace = _workspaces[key] = functional.get_workspace(
                settings.config,
                self._mok_group,
                device=x.device,
                # Beyond what the user has set, a call is refused on every rank.
                num_local_tokens=settings.max_tokens_per_rank or max(tokens or 0, x.shape[0], 1),
                hidden_size=x.shape[1],
                topk=self.token_dispatcher.topk,
                num_local_experts=self.num_local_experts,
                intermediate_size=weights.intermediate_size,
                dtype=x.dtype,
            )
        return workspace


_workspaces: dict[tuple[Any, ...], functional.MoKWorkspace] = {}
# What each layer used last, since finding it costs more host time than a look at it.
_last_workspaces: weakref.WeakKeyDictionary[MoKMoELayer, tuple[functional.MoKWorkspace, tuple[Any, ...]]] = weakref.WeakKeyDictionary()


def tokens_per_rank(args: Namespace | None) -> int | None:
    """The most tokens a rank brings to an MoE layer, from Megatron's arguments; None where they do not tell."""
    sequence = max(getattr(args, "seq_length", None) or 0, getattr(args, "decoder_seq_length", None) or 0)
    micro_batch = max(getattr(args, "micro_batch_size", None) or 0, getattr(args, "eval_micro_batch_size", None) or 0)
    if not sequence or not micro_batch:
        return None
    shards = getattr(args, "context_parallel_size", 1)
    if getattr(args, "sequence_parallel", False):
        shards *= getattr(args, "tensor_model_parallel_size", 1)
    tokens = -(-sequence // shards) * micro_batch
    # With dynamic context parallelism a rank may get a longer piece than its even share.
    return max(tokens, getattr(args, "max_seqlen_per_dp_cp_rank", None) or 0)


def adopt(layer: Any, settings: RunSettings, pg_collection: Any) -> None:
    """Makes a freshly built stock layer a MoK layer, in place.

    Args:
        layer: a ``MoELayer``, after its own ``__init__``.
        settings: the run's; they stay with the layer.
        pg_collection: the process groups that the layer was built with.
    """
    reader = WeightReader()
    reader.read(layer.experts, layer.num_local_experts)  # an unknown layout is told here, not at the first step
    stock_dispatcher = layer.token_dispatcher
    dispatcher = MoKTokenDispatcher(layer.config, pg_collection)
    if stock_dispatcher.shared_experts is not None:
        dispatcher.set_shared_experts(stock_dispatcher.shared_experts)
    layer.token_dispatcher = dispatcher
    layer.__class__ = MoKMoELayer
    layer._mok_settings = settings
    layer._mok_group = pg_collection.ep if pg_collection.ep is not None and pg_collection.ep.size() > 1 else None
    layer._mok_microbatches = MicrobatchMemory()
    layer._mok_reader = reader
    layer._mok_load = None
    if settings.log_expert_load:
        layer._mok_load = LoadCounter(layer._mok_group, getattr(pg_collection, "expt_dp", None))
    compat.mask_expert_bias_counts(layer.router)

    def remember_padding(router_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        dispatcher.mark_padding(kwargs.get("padding_mask", args[1] if len(args) > 1 else None))

    # The mask reaches the router and nobody after it.
    layer.router.register_forward_pre_hook(remember_padding, with_kwargs=True)

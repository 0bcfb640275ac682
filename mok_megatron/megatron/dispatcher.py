"""The token dispatcher of a MoK layer: it moves nothing, since the megakernel does.

It turns the router's output into routes, carries them to the experts' call, and drives an overlapped shared expert. T local tokens,
K routes a token, H hidden, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from mok_megatron.megatron.router import routes_and_weights


class MoKTokenDispatcher(MoETokenDispatcher):
    """Pass-through dispatcher.

    ``topk_experts`` ([T, K] int32, -1 = no route) is the one tensor it holds between ``dispatch_preprocess`` and the experts;
    ``cudagraph_attrs`` names it, so that a graph which ends after the preprocessing hands it over at replay.
    """

    def __init__(self, config: Any, pg_collection: Any) -> None:
        super().__init__(config, pg_collection=pg_collection)
        self.topk = config.moe_router_topk
        self.topk_experts: Tensor | None = None
        self.cudagraph_attrs = ["topk_experts"]
        self.hidden_shape: torch.Size | None = None
        self._padding_mask: Tensor | None = None
        self._routing_map: Tensor | None = None

    def mark_padding(self, padding_mask: Tensor | None) -> None:
        """The padding mask of the tokens that come next: bool, T elements in the order of the tokens, True = padding."""
        self._padding_mask = padding_mask

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [.., H], map and probabilities [T, E] to tokens [T, H] and router weights [T, K] fp32.

        Padding tokens lose their routes here: stock Megatron leaves them in the map, where they take expert capacity and
        count as load.
        """
        self.hidden_shape = tokens.shape
        routing_map = routing_map.bool()
        if self._padding_mask is not None:
            routing_map = routing_map & ~self._padding_mask.reshape(-1, 1)
            self._padding_mask = None
        self._routing_map = routing_map
        self.topk_experts, router_weights = routes_and_weights(probs, routing_map, self.topk)
        return tokens.reshape(-1, tokens.shape[-1]), router_weights

    def take_routes(self) -> tuple[Tensor, Tensor | None]:
        """``topk_experts`` of the current call and the map they come from (None at a graph replay); forgets both."""
        topk_experts, routing_map = self.topk_experts, self._routing_map
        assert topk_experts is not None, "dispatch_preprocess comes before the experts"
        self.topk_experts = self._routing_map = None
        return topk_experts, routing_map

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing to send; starts an overlapped shared expert, whose stream then runs beside the megakernel."""
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states.view(self.hidden_shape))
            self.shared_experts.linear_fc1_forward_and_act()
            self.shared_experts.linear_fc2_forward()
            self.shared_experts.post_forward_comm()
        return hidden_states, probs

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Nothing to receive."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Output [T, H] back to the tokens' shape, with the overlapped shared expert's output added."""
        output = hidden_states.view(self.hidden_shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> Any:
        """Never called: ``MoKMoELayer.routed_experts_compute`` takes its place."""
        raise NotImplementedError("a MoK layer has no per-expert permutation; call the layer, not its dispatcher")

    def combine_preprocess(self, hidden_states: Tensor) -> Any:
        """Never called, as ``dispatch_postprocess``."""
        raise NotImplementedError("a MoK layer has no per-expert permutation; call the layer, not its dispatcher")

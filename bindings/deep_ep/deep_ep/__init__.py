# SPDX-License-Identifier: Apache-2.0
"""DeepEP's interface (V1) over MoECCL: Buffer, Config, EventOverlap, topk_idx_t.

    import deep_ep
    buffer = deep_ep.Buffer(group)
    per_rank, per_host, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    rows, idx, weights, counts, handle, _ = buffer.dispatch(
        x, topk_idx=topk_idx, topk_weights=topk_weights, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert)
    out, _, _ = buffer.combine(experts(rows, idx, weights), handle)

MoECCL's docs/deepep.md lists, call by call, what is covered and what differs from DeepEP."""
import torch

from .buffer import Buffer
from .config import Config
from .utils import EventHandle, EventOverlap

topk_idx_t = torch.int64  # the type of expert numbers that every call takes; calls accept int32 too

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]

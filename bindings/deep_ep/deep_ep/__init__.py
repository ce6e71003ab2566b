# SPDX-License-Identifier: Apache-2.0
"""DeepEP's interface over MoECCL: Buffer (V1), ElasticBuffer (V2), HybridEPBuffer.

    import deep_ep
    buffer = deep_ep.Buffer(group)
    per_rank, per_host, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    rows, idx, weights, counts, handle, _ = buffer.dispatch(
        x, topk_idx=topk_idx, topk_weights=topk_weights, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert)
    out, _, _ = buffer.combine(experts(rows, idx, weights), handle)

    elastic = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8)
    rows, idx, weights, handle, _ = elastic.dispatch(x, topk_idx=topk_idx, topk_weights=topk_weights, num_experts=256)
    out, _, _ = elastic.combine(experts(rows, idx, weights), handle)

MoECCL's docs/deepep.md lists, call by call, what is covered and what differs from DeepEP."""
import torch

from .buffer import Buffer
from .config import Config
from .elastic import ElasticBuffer, get_logical_domain_size, get_physical_domain_size
from .handle import EPHandle
from .hybrid_ep_buffer import HybridEPBuffer
from .utils import EventHandle, EventOverlap

topk_idx_t = torch.int64  # the type of expert numbers that every call takes; calls accept int32 too

__version__ = "2.1.0"  # DeepEP's, for programs that compare it

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "HybridEPBuffer",
           "get_logical_domain_size", "get_physical_domain_size", "topk_idx_t"]

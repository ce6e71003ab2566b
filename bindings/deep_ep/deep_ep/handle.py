# SPDX-License-Identifier: Apache-2.0
"""EPHandle: what ElasticBuffer.dispatch tells about the rows that it brought, and what combine needs to return them."""


class EPHandle:
    """The handle of a dispatch. Later dispatches and combines on this ElasticBuffer, or on another of the same ranks, take it.

    T is the number of this rank's tokens, k that of the choices, R the number of received rows, L that of this rank's experts. The
    tensors lie on the device of x. With do_cpu_sync=False or async_with_compute_stream=True, wait for the dispatch before you read
    them; with do_cpu_sync=False, R is here the worst case, and what lies beyond the received rows is -1.

    do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: as the dispatch was called.
    topk_idx: [T, k], the choices; a copy, or with do_handle_copy=False the caller's tensor.
    num_recv_tokens, num_expanded_tokens: rows of the results without and with do_expand; the worst case with do_cpu_sync=False.
    num_recv_tokens_per_expert_list: rows of each local expert, rounded up to expert_alignment; [] with do_cpu_sync=False.
    psum_num_recv_tokens_per_scaleup_rank: int32 [scale-up ranks]; entry i counts the rows from scale-up ranks 0 to i, and the last
        one all received rows.
    psum_num_recv_tokens_per_expert: int32 [L]. Entry i is where the rows of expert i end, when the groups of all experts begin at
        multiples of expert_alignment. Without do_expand, its padding is included; with do_expand it is not, so that entry i,
        rounded up, is where expert i + 1 begins.
    num_unaligned_recv_tokens_per_expert: int32 [L], rows of each local expert without padding.
    recv_src_metadata: int32 [R, 2 + k]. Column 0 is the source rank * num_max_tokens_per_rank + the token's index there; rows are
        in this order. Column 1 is the source's scale-up rank * k + the last of the choices that are experts here. With do_expand,
        column 2 + j is the row of the result that holds choice j, and -1 where choice j is no expert here; otherwise it is -1.
    dst_buffer_slot_idx: int32 [T, k]; for the last of the choices that are experts of one rank, this rank *
        num_max_tokens_per_rank + the number of tokens before that go to the same rank; -1 for other choices. MoECCL finds what
        belongs to the handle by this tensor, so an EPHandle made from another's fields must have it.
    token_metadata_at_forward, channel_linked_list: None, because only DeepEP's kernels read them."""

    def __init__(self, do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms, topk_idx, num_recv_tokens,
                 num_expanded_tokens, num_recv_tokens_per_expert_list, psum_num_recv_tokens_per_scaleup_rank,
                 psum_num_recv_tokens_per_expert, num_unaligned_recv_tokens_per_expert, recv_src_metadata, dst_buffer_slot_idx,
                 token_metadata_at_forward=None, channel_linked_list=None):
        self.do_expand = do_expand
        self.num_experts, self.expert_alignment = num_experts, expert_alignment
        self.num_max_tokens_per_rank, self.num_sms = num_max_tokens_per_rank, num_sms
        self.topk_idx = topk_idx
        self.num_recv_tokens, self.num_expanded_tokens = num_recv_tokens, num_expanded_tokens
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self.psum_num_recv_tokens_per_scaleup_rank = psum_num_recv_tokens_per_scaleup_rank
        self.psum_num_recv_tokens_per_expert = psum_num_recv_tokens_per_expert
        self.num_unaligned_recv_tokens_per_expert = num_unaligned_recv_tokens_per_expert
        self.recv_src_metadata, self.dst_buffer_slot_idx = recv_src_metadata, dst_buffer_slot_idx
        self.token_metadata_at_forward, self.channel_linked_list = token_metadata_at_forward, channel_linked_list

# SPDX-License-Identifier: Apache-2.0
"""Config: DeepEP's tuning numbers. MoECCL's planner makes its own choices, so they only determine size hints."""

_META_BYTES = 128 * (8 + 4 + 4)  # per row, as much as V1 reserves: 128 choices of an int64 and a float, 128 scales


class Config:
    """The tuning numbers of a dispatch or combine. They are checked as in DeepEP and do not affect results."""

    def __init__(self, num_sms=20, num_max_nvl_chunked_send_tokens=6, num_max_nvl_chunked_recv_tokens=256,
                 num_max_rdma_chunked_send_tokens=6, num_max_rdma_chunked_recv_tokens=256):
        for kind, send, recv in (("nvl", num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens),
                                 ("rdma", num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens)):
            if not 0 < send < recv:
                raise ValueError(f"num_max_{kind}_chunked_send_tokens is {send}: give a number between 0 and "
                                 f"num_max_{kind}_chunked_recv_tokens, which is {recv}")
        if num_sms < 0:
            raise ValueError(f"num_sms is {num_sms}: give 0 or more")
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        """Returns bytes for Buffer's num_nvl_bytes. MoECCL reserves its own staging (MOECCL_STAGING_BYTES). The number
        reserves nothing, but it grows with hidden_bytes and num_ranks, so that callers that compare sizes still work."""
        return self._bytes(min(num_ranks, 8), self.num_max_nvl_chunked_recv_tokens, hidden_bytes)

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        """Does the same for num_rdma_bytes; 0 for up to 8 ranks, which V1 takes to be one host."""
        return 0 if num_ranks <= 8 else 2 * self._bytes(-(-num_ranks // 8), self.num_max_rdma_chunked_recv_tokens,
                                                        hidden_bytes)

    def _bytes(self, n_peers, n_tokens, hidden_bytes):
        n = max(1, self.num_sms // 2) * n_peers * n_tokens * (hidden_bytes + _META_BYTES)
        return -(-n // 128) * 128

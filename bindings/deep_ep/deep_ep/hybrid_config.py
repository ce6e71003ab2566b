# SPDX-License-Identifier: Apache-2.0
"""The configs of HybridEPBuffer. They say what a call is about. The numbers for kernels in them have DeepEP's names and
defaults and no effect, because MoECCL's planner makes its own choices."""
import dataclasses
import enum


class APP_TOKEN_DATA_TYPE(enum.Enum):  # noqa: N801 (DeepEP's name)
    """What dispatch moves: UINT8 stands for rows of 1 byte per element with scaling factors, UINT16 for all others."""
    UINT16 = 0
    UINT8 = 1

    def __str__(self):
        return f"{self.name.lower()}_t"


@dataclasses.dataclass
class _Config:
    """What both configs have."""
    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int
    token_data_type: APP_TOKEN_DATA_TYPE
    num_of_blocks_preprocessing_api: int
    num_of_blocks_dispatch_api: int
    num_of_blocks_combine_api: int
    num_of_tokens_per_chunk_dispatch_api: int
    num_of_tokens_per_chunk_combine_api: int

    def is_valid(self, fuse_permute_dispatch=False):
        """Returns whether MoECCL can run it: it needs sizes of 1 or more, and no multiples. fuse_permute_dispatch has
        no effect."""
        return self.wrong_size() is None

    def wrong_size(self):
        """Returns the name of a field that must be 1 or more and is not, or None."""
        return next((name for name in ("hidden_dim", "num_of_experts_per_rank", "num_of_ranks_per_node", "num_of_nodes",
                                       "pad_multiple") if getattr(self, name, 1) < 1), None)


@dataclasses.dataclass
class BufferConfig(_Config):
    """What a HybridEPBuffer was made for. max_num_of_tokens_per_rank grows with the calls."""

    @property
    def num_of_dispatch_chunks(self):
        return -(-self.max_num_of_tokens_per_rank // self.num_of_tokens_per_chunk_dispatch_api)

    @property
    def num_of_combine_chunks(self):
        return -(-self.max_num_of_tokens_per_rank // self.num_of_tokens_per_chunk_combine_api)


@dataclasses.dataclass
class HybridEpConfigInstance(_Config):
    """What one call is about; update_template_config makes it, and handles hold it."""
    num_of_blocks_permute: int
    num_of_blocks_unpermute: int
    num_of_stages_g2s_combine_api: int
    pad_multiple: int = 1
    num_of_tokens_per_chunk_preprocessing_api: int = 64
    num_of_threads_per_block_preprocessing_api: int = 256
    num_of_stages_dispatch_api: int = 10
    num_of_stages_permute_block_dispatch_api: int = 10
    num_of_in_flight_s2g_dispatch_api: int = 8
    num_of_in_flight_s2g_permute_block_dispatch_api: int = 8
    num_of_additional_in_flight_s2g_dispatch_api: int = 6
    forward_dispatch_api: bool = True
    device_side_sync_dispatch_api: bool = True
    num_of_stages_s2g_combine_api: int = 2
    num_of_stages_g2s_unpermute_block: int = 2
    num_of_stages_s2g_unpermute_block: int = 2
    num_of_tokens_per_group_combine_api: int = 4
    num_of_additional_in_flight_s2g_combine_api: int = 2
    num_of_additional_in_flight_s2g_unpermute_block_combine_api: int = 2
    backward_combine_api: bool = True
    device_side_sync_combine_api: bool = True


class Configurer:
    """Makes the configs of calls from that of the buffer. num_sms_* and num_blocks_*: numbers for kernels; None for
    DeepEP's defaults on a GPU of 132 SMs."""

    def __init__(self, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, num_of_ranks_per_node, num_of_nodes,
                 use_fp8=False, num_sms_dispatch_api=None, num_sms_combine_api=None, num_sms_preprocessing_api=None,
                 num_blocks_permute=None, num_blocks_unpermute=None):
        usual = 24 if num_of_nodes == 1 else 8
        kind = APP_TOKEN_DATA_TYPE.UINT8 if use_fp8 else APP_TOKEN_DATA_TYPE.UINT16
        self.buffer_config = BufferConfig(
            hidden_dim, max_num_of_tokens_per_rank, num_local_experts, num_of_ranks_per_node, num_of_nodes, kind,
            _given(num_sms_preprocessing_api, 108), _given(num_sms_dispatch_api, usual),
            _given(num_sms_combine_api, usual), 64, 64)
        self._num_blocks_permute, self._num_blocks_unpermute = num_blocks_permute, num_blocks_unpermute

    def get_default_config(self, fuse_permute_dispatch=False):
        """Returns a HybridEpConfigInstance for calls of the buffer's shape."""
        most = 108 if fuse_permute_dispatch else 132 * 16
        return HybridEpConfigInstance(
            **vars(self.buffer_config), num_of_blocks_permute=_given(self._num_blocks_permute, most),
            num_of_blocks_unpermute=_given(self._num_blocks_unpermute, most),
            num_of_stages_g2s_combine_api=10 if self.buffer_config.num_of_nodes == 1 else 5)

    def adjust_template(self, config, fuse_permute_dispatch=False):
        """Lets the buffer's config have room for this one. fuse_permute_dispatch has no effect: no kernel's memory has
        to fit."""
        buffer = self.buffer_config
        buffer.max_num_of_tokens_per_rank = max(buffer.max_num_of_tokens_per_rank, config.max_num_of_tokens_per_rank)

    def updated_config(self, changes, fuse_permute_dispatch=False):
        """Returns the default config with these fields changed. Raises ValueError where a field is unknown, or where a
        size is less than 1."""
        config = self.get_default_config(fuse_permute_dispatch)
        for name, value in changes.items():
            if not hasattr(config, name):
                raise ValueError(f"{name} is not a field of HybridEpConfigInstance: give one of "
                                 f"{', '.join(field.name for field in dataclasses.fields(config))}")
            setattr(config, name, value)
        wrong = config.wrong_size()
        if wrong is not None:
            raise ValueError(f"{wrong} is {getattr(config, wrong)}: give 1 or more")
        self.adjust_template(config, fuse_permute_dispatch)
        return config


def _given(number, default):
    return default if number is None else number

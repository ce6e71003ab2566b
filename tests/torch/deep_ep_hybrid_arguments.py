# SPDX-License-Identifier: Apache-2.0
"""Cases of deep_ep_hybrid_test.py about arguments: what is refused, what is deprecated, and the configs."""
import os
import warnings

import torch

from deep_ep_hybrid_support import Case, make
from deep_ep_support import DEEP_EP, DEVICE, raises


def ranks_that_differ_are_told(buffer):
    other = buffer.rank == buffer.group_size - 1
    case, narrow, single = Case(buffer, 12), Case(buffer, 12, hidden=32), Case(buffer, 12, dtype=torch.float32)
    last = buffer.group_size - 1
    for words, call in (
            (f"ranks 0 and {last} differ in the columns of hidden, 64 and 32: ",
             lambda: (narrow if other else case).permute()),
            (f"ranks 0 and {last} differ in the dtype of hidden, torch.bfloat16 and torch.float32: ",
             lambda: (single if other else case).dispatch()),
            ("differ in the kind of call, dispatch and dispatch_with_permute: ",
             case.permute if other else case.dispatch),
            ("differ in the pad_multiple, 4 and 8: ", lambda: case.permute(pad_multiple=8 if other else 4)),
            ("differ in the presence of probs, given and None: ",
             lambda: case.permute(probs=None if other else case.probs))):
        raises(ValueError, words, call)
        case.check_dense(case.dispatch())
    raises(ValueError, f"ranks 0 and {last} differ in num_local_experts, 4 and 5: ",
           lambda: DEEP_EP().HybridEPBuffer(buffer.group, 64, 64, 5 if other else 4))


def other_differences_fail_on_all_ranks(buffer):
    """Numbers of experts, and calls with a handle, are not compared before. The communicator has failed afterwards. A call on CUDA tensors
    may return before it has failed."""
    import moeccl
    last, n = buffer.rank == buffer.group_size - 1, buffer.group_size
    for call in (lambda case, handle: case.permute(routing_map=torch.ones(9, n * (3 if last else 2)) > 0, probs=None,
                                                   num_of_experts_per_rank=3 if last else 2),
                 lambda case, handle: case.buffer.dispatch(case.x.double() if last else case.x, handle=handle)):
        case = Case(make(buffer.group), 9)
        handle = case.dispatch()[-1]
        over = case.buffer._comm.finish if DEVICE != "cpu" else lambda: None
        raises(moeccl.Error, "ranks disagree on the", lambda: (call(case, handle), over()))
        case.buffer.destroy()


def bad_arguments_are_named(buffer):
    case, n = Case(buffer, 12), 16
    permuted, handle = case.permute(pad_multiple=4), case.dispatch()[-1]
    permute, again = buffer.dispatch_with_permute, {"hidden": case.x, "handle": permuted[-1]}
    row, fp8 = permuted[0], case.x.to(torch.float8_e4m3fn)
    for kind, words, call in (
            (TypeError, "hidden is a list", lambda: case.dispatch(hidden=[1])),
            (TypeError, "hidden is torch.int64", lambda: case.dispatch(hidden=case.x.long())),
            (ValueError, "hidden is torch.bfloat16 [768]", lambda: case.permute(hidden=case.x.view(-1))),
            (ValueError, "hidden has 0 columns", lambda: case.dispatch(hidden=case.x[:, :0])),
            (TypeError, "hidden lies on meta", lambda: case.dispatch(hidden=case.x.to("meta"))),
            (ValueError, "hidden is torch.float8_e4m3fn, and use_fp8 is False", lambda: case.dispatch(
                hidden=fp8, scaling_factor=case.x)),
            (ValueError, "hidden is torch.bfloat16, and use_fp8 is True", lambda: case.permute(use_fp8=True)),
            (TypeError, "scaling_factor is a NoneType", lambda: case.permute(hidden=fp8, use_fp8=True)),
            (ValueError, "scaling_factor is [3, 64]", lambda: case.permute(
                hidden=fp8, use_fp8=True, scaling_factor=case.x[:3])),
            (ValueError, "routing_map and topk_idx are None", lambda: case.dispatch(routing_map=None)),
            (TypeError, "routing_map is torch.int64", lambda: case.dispatch(routing_map=case.map.long())),
            (ValueError, "routing_map is torch.bool [12, 15]", lambda: case.permute(routing_map=case.map[:, :15])),
            (ValueError, f"num_of_experts is {n - 1}", lambda: case.dispatch(num_of_experts=n - 1)),
            (TypeError, "probs is torch.float64", lambda: case.dispatch(probs=case.probs.double())),
            (ValueError, "probs is torch.float32 [12, 3]", lambda: case.permute(probs=case.probs[:, :3])),
            (ValueError, "topk_idx holds 16", lambda: buffer.dispatch(case.x, topk_idx=torch.full((12, 2), 16))),
            (ValueError, "topk_idx holds -2", lambda: buffer.dispatch(case.x, topk_idx=torch.full((12, 2), -2))),
            (ValueError, "topk_weights is torch.float32 [12, 1]", lambda: buffer.dispatch(
                case.x, topk_idx=torch.zeros((12, 2), dtype=torch.int64), topk_weights=torch.ones(12, 1))),
            (ValueError, "pad_multiple is -1", lambda: case.permute(pad_multiple=-1)),
            (ValueError, "num_permuted_tokens is None", lambda: case.permute(non_blocking=True)),
            (ValueError, "num_permuted_tokens is -5", lambda: case.permute(num_permuted_tokens=-5)),
            (ValueError, "num_permuted_tokens is 9: with non_blocking", lambda: case.permute(
                pad_multiple=4, num_permuted_tokens=9, non_blocking=True)),
            (ValueError, "num_of_experts_per_rank is 0", lambda: case.permute(num_of_experts_per_rank=0)),
            (ValueError, "pad_multiple is 8: it was 4", lambda: permute(pad_multiple=8, **again)),
            (ValueError, "hidden has 3 rows", lambda: permute(hidden=case.x[:3], handle=permuted[-1])),
            (ValueError, "pad_multiple is 1: it was 4", lambda: buffer.combine_with_unpermute(
                hidden=row, handle=permuted[-1], pad_multiple=1)),
            (ValueError, "give as many", lambda: buffer.combine_with_unpermute(hidden=row[:0], handle=permuted[-1])),
            (ValueError, "probs is torch.float32 [1]", lambda: buffer.combine_with_unpermute(
                hidden=row, probs=torch.ones(1), handle=permuted[-1])),
            (TypeError, "hidden is torch.float8_e4m3fn", lambda: buffer.combine(fp8, None, handle)),
            (ValueError, "probs is torch.float32 [1, 1]", lambda: buffer.combine(
                case.dense(case.of(lambda x: x)), torch.ones(1, 1), handle)),
            (ValueError, "handle is None", lambda: buffer.combine(row)),
            (ValueError, "handle is None", lambda: buffer.combine_with_unpermute(hidden=row)),
            (TypeError, "give what dispatch_with_permute returned", lambda: buffer.combine_with_unpermute(
                hidden=row, handle=handle)),
            (TypeError, "give what dispatch returned", lambda: buffer.combine(row, None, permuted[-1])),
            (ValueError, "hidden_dim is 0", lambda: DEEP_EP().HybridEPBuffer(buffer.group, 0, 1, 1)),
            (ValueError, "num_local_experts is 0", lambda: DEEP_EP().HybridEPBuffer(buffer.group, 1, 1, 0)),
            (ValueError, "max_sms is not a field", lambda: buffer.update_template_config(max_sms=3))):
        raises(kind, words, call)
    case.check_combine(handle)
    case.check_unpermute(permuted[-1], 4)
    ended = make(buffer.group)
    ended.destroy()
    raises(RuntimeError, "was destroyed", lambda: Case(ended, 4).dispatch())


def deprecated_arguments(buffer):
    case = Case(buffer, 10)
    for words, call in (
            ("num_dispatched_tokens is deprecated", lambda: case.check_permuted(case.permute(num_dispatched_tokens=3))),
            ("use_host_meta is deprecated", lambda: case.permute(num_permuted_tokens=0, use_host_meta=False)),
            ("num_dispatched_tokens is deprecated", lambda: buffer.combine_with_unpermute(
                hidden=case.permuted(case.of(lambda x: x)), handle=case.permute()[-1], num_dispatched_tokens=1))):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            call()
        places = [os.path.basename(w.filename) for w in told if words in str(w.message)]
        assert len(places) == 1 and places[0].startswith("deep_ep_hybrid_"), [str(w) for w in told]  # the caller's line
    unused = {"num_dispatched_tokens": torch.tensor(3), "num_dispatched_tokens_tensor": torch.tensor([3])}
    case.check_dense(case.dispatch(**unused))


def ranks_of_an_nvlink_domain(buffer):
    size, name = buffer.group_size, "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
    domain = 2 if os.environ.get("MOECCL_HOST_ID") else size
    assert buffer.num_of_hybrid_ep_ranks_per_nvlink_domain == domain and buffer.num_of_nodes == size // domain
    assert (buffer.local_rank, buffer.node_rank) == (buffer.rank % domain, buffer.rank // domain)
    try:
        os.environ[name] = "1"
        alone = make(buffer.group)
        assert (alone.num_of_nodes, alone.local_rank, alone.node_rank) == (size, 0, buffer.rank)
        case = Case(alone, 20)
        case.check_combine(case.check_dense(case.dispatch()))
        alone.destroy()
        os.environ[name] = "3"
        raises(ValueError, f"{name} is 3: give a divisor of the group's {size} ranks", lambda: make(buffer.group))
        os.environ[name] = str(1 + buffer.rank % 2)
        raises(ValueError, f"differ in {name}, 1 and 2", lambda: make(buffer.group))
    finally:
        del os.environ[name]
    from deep_ep._base import ranks_per_host
    for hosts, expected in (([0, 0, 0], 3), ([0, 1, 2], 1), ([0, 0, 1, 1], 2), ([0, 1, 0, 1], None), ([0, 0, 1], None),
                            ([0, 1, 1], None)):
        assert ranks_per_host(hosts) == expected, f"{hosts}: {ranks_per_host(hosts)}"


def configs(buffer):
    other = make(buffer.group, num_sms_dispatch_api=6, num_blocks_permute=11, num_sms_preprocessing_api=0)
    config = other.update_template_config()
    assert (config.hidden_dim, config.num_of_experts_per_rank, config.pad_multiple) == (64, 16 // buffer.group_size, 1)
    assert (config.num_of_blocks_dispatch_api, config.num_of_blocks_permute) == (6, 11)
    assert config.num_of_blocks_preprocessing_api == 0
    assert config.token_data_type.name == "UINT16" and config.max_num_of_tokens_per_rank == 64
    config = other.update_template_config(128, 100, 3, 16, True, True, num_of_stages_dispatch_api=7)
    assert (config.hidden_dim, config.max_num_of_tokens_per_rank, config.num_of_experts_per_rank) == (128, 112, 3)
    assert (config.pad_multiple, config.token_data_type.name, config.num_of_stages_dispatch_api) == (16, "UINT8", 7)
    assert other.configurer.buffer_config.max_num_of_tokens_per_rank == 112
    assert other.configurer.buffer_config.num_of_dispatch_chunks == 2 and other.configurer.buffer_config.is_valid()
    assert other.configurer.get_default_config(fuse_permute_dispatch=True).is_valid(fuse_permute_dispatch=True)
    other.empty_jit_cache()
    other.destroy()

# SPDX-License-Identifier: Apache-2.0
"""Checks of the calls' arguments: each error names the argument, its value and an acceptable value."""
import torch
import torch.distributed as dist

from . import _forms, _native

_INDEX = (torch.int64, torch.int32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def require(holds, error, sentence, *values):
    if not holds:
        raise error(sentence.format(*values))


def check_tensor(name, tensor):
    require(isinstance(tensor, torch.Tensor), TypeError, "{} is a {}: give a torch tensor", name, type(tensor).__name__)


def check_devices(device, named):
    """Checks that all tensors lie on this device, and that it is one for MoECCL. named: tensors by the name of their argument."""
    for name, tensors in named.items():
        for tensor in tensors:
            require(tensor.device.type in ("cpu", "cuda"), TypeError,
                    "{} lies on {}: deep_ep over MoECCL takes CPU tensors and CUDA tensors", name, tensor.device)
            require(tensor.device == device, TypeError, "{} lies on {}, and the call's first tensor on {}: give all on one device",
                    name, tensor.device, device)


def check_cpu(call, name, tensor):
    check_tensor(name, tensor)
    require(tensor.device.type == "cpu", NotImplementedError, "{}: {} lies on {}, and MoECCL does this for CPU tensors only: give one, or "
            "use moeccl's collectives, which take CUDA tensors", call, name, tensor.device)


def check_shape(name, tensor, dtypes, shape, what):
    """Accepts only tensors of these types and this shape; None in shape means any number."""
    check_tensor(name, tensor)
    fits = tensor.dim() == len(shape) and all(s in (None, t) for s, t in zip(shape, tensor.shape))
    require(fits and tensor.dtype in dtypes, TypeError if tensor.dtype not in dtypes else ValueError,
            "{} is {} {}: give {}", name, tensor.dtype, list(tensor.shape), what)


def check_same(call, fields, told):
    """Raises an error if ranks differ in a field. fields: by its name, a function that returns a number as errors show it. told: the
    numbers of each rank, the same lists on all ranks."""
    for at, (name, shown) in enumerate(fields.items()):
        for rank, theirs in enumerate(told):
            require(theirs[at] == told[0][at], ValueError, "{}: ranks 0 and {} differ in the {}, {} and {}: give the same on all ranks",
                    call, rank, name, shown(told[0][at]), shown(theirs[at]))


def check_group(group, comm):
    """Returns (this rank, number of ranks, a function that gathers an object from all ranks)."""
    if group is not None:
        require(isinstance(group, dist.ProcessGroup), TypeError, "group is a {}: give a torch.distributed process group, or an mpi4py communicator as comm",
                type(group).__name__)

        def gather(thing):
            told = [None] * group.size()
            dist.all_gather_object(told, thing, group)
            return told
        return group.rank(), group.size(), gather
    if comm is not None:
        return comm.Get_rank(), comm.Get_size(), comm.allgather
    raise ValueError("group and comm are None: give a torch.distributed process group, or an mpi4py communicator as comm")


def check_x(x, combine=False):
    """Checks x of a dispatch, rows or (rows, scales), or of a combine, and returns the number of its rows."""
    pair = isinstance(x, tuple) and not combine
    require(not pair or len(x) == 2, ValueError, "x is a tuple of {}: give (rows, scales)", len(x) if pair else 0)
    rows, scales = x if pair else (x, None)
    kinds = _FP8 if pair else tuple(_native.TYPES)
    check_shape("x[0]" if pair else "x", rows, kinds, (None, None),
           f"[{'rows' if combine else 'tokens'}, hidden] of " + " or ".join(str(k).split(".")[1] for k in kinds))
    require(rows.size(1) > 0, ValueError, "x has {} columns: give 1 or more", rows.size(1))
    n = rows.size(0)
    if pair:
        check_tensor("x[1]", scales)
        require(scales.dim() == 2 and scales.size(0) == n and scales.size(1) > 0, ValueError,
                "x[1] is {}: give scales [{}, n]", list(scales.shape), n)
    return n


def check_rows(x, topk_idx=None, topk_weights=None):
    """Checks x, topk_idx and topk_weights of a dispatch and returns them as Rows."""
    from ._throughput import Rows
    n = check_x(x)
    require((topk_idx is None) == (topk_weights is None), ValueError,
            "topk_idx is {}, topk_weights is {}: give both or neither", *("None" if t is None else "given"
                                                                         for t in (topk_idx, topk_weights)))
    if topk_idx is not None:
        check_shape("topk_idx", topk_idx, _INDEX, (n, None), f"int64 [{n}, k], a row for each of x's")
        check_shape("topk_weights", topk_weights, (torch.float32, ), tuple(topk_idx.shape),
               f"float32 {list(topk_idx.shape)}, as topk_idx")
    return Rows(x, topk_idx, topk_weights)


def check_choices(topk_idx, num_experts, n_ranks):
    require(num_experts >= 1 and num_experts % n_ranks == 0, ValueError,
            "num_experts is {}: give a multiple of the group's {} ranks", num_experts, n_ranks)
    require(topk_idx.dim() == 2 and topk_idx.dtype in _INDEX, TypeError, "topk_idx is {} {}: give int64 [tokens, k]",
            topk_idx.dtype, list(topk_idx.shape))
    check_expert_numbers(topk_idx, num_experts)


def check_expert_numbers(topk_idx, num_experts):
    if topk_idx.numel():
        least, most = (int(v) for v in torch.aminmax(topk_idx))
        require(least >= -1 and most < num_experts, ValueError,
                "topk_idx holds {}: give expert numbers from 0 to {}, or -1 for none", least if least < -1 else most,
                num_experts - 1)


def check_distinct(topk_idx):
    """Refuses tokens that name an expert twice."""
    ordered = topk_idx.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1).nonzero()
    require(twice.numel() == 0, ValueError, "topk_idx names an expert twice in row {}: results of do_expand without do_cpu_sync have no "
            "room for that; give distinct experts, or do_cpu_sync=True", int(twice[0]) if twice.numel() else 0)


def check_counts(name, tensor, n_local):
    """Checks a tensor of statistics, to which the rows of each local expert are added."""
    check_shape(name, tensor, (torch.int32, ), (n_local, ), f"int32 [{n_local}], one for each local expert")
    require(tensor.is_contiguous(), ValueError, "{} is not contiguous: give a contiguous tensor", name)


def check_layout(rows, per_rank, in_rank, per_expert, n_ranks):
    """Checks num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert of a dispatch without a handle."""
    for name, tensor in (("num_tokens_per_rank", per_rank), ("is_token_in_rank", in_rank),
                         ("num_tokens_per_expert", per_expert)):
        require(tensor is not None, ValueError, "{} is None: give what get_dispatch_layout returned, or a handle", name)
    n = rows.x.size(0)
    check_shape("num_tokens_per_rank", per_rank, (torch.int32, ), (n_ranks, ), f"int32 [{n_ranks}]")
    check_shape("is_token_in_rank", in_rank, (torch.bool, ), (n, n_ranks), f"bool [{n}, {n_ranks}]")
    check_shape("num_tokens_per_expert", per_expert, (torch.int32, ), (None, ), "int32 [num_experts]")
    require(per_expert.numel() > 0 and per_expert.numel() % n_ranks == 0, ValueError,
            "num_tokens_per_expert has {} experts: give a multiple of the group's {} ranks", per_expert.numel(), n_ranks)


def unpack_bias(bias, x, n_tokens):
    biases = bias if isinstance(bias, tuple) else (bias, )
    require(len(biases) <= 2, ValueError, "bias is a tuple of {}: give one or two", len(biases))
    biases = tuple(one for one in biases if one is not None)
    for one in biases:
        check_shape("bias", one, (x.dtype, ), (n_tokens, x.size(1)), f"{x.dtype} [{n_tokens}, {x.size(1)}], as the result")
    return biases


def form_of(use_fp8, round_scale, use_ue8m0, use_nvfp4, use_ue8m0_for_sf, x_global_scale):
    """Returns the form in which low_latency_dispatch sends rows."""
    require(not use_ue8m0 or (use_fp8 and round_scale), ValueError,
            "use_ue8m0 is {}: it needs use_fp8=True and round_scale=True", use_ue8m0)
    require(not use_ue8m0_for_sf, NotImplementedError, "use_ue8m0_for_sf is {}: MoECCL sends NVFP4 with scales in e4m3; leave it False",
            use_ue8m0_for_sf)
    if not use_nvfp4:
        return _forms.Fp8(round_scale, use_ue8m0) if use_fp8 else _forms.Bfloat16()
    require(not use_fp8, ValueError, "use_fp8 is {} and use_nvfp4 {}: give one of them", use_fp8, use_nvfp4)
    check_tensor("x_global_scale", x_global_scale)
    require(x_global_scale.numel() == 1 and x_global_scale.dtype == torch.float32, TypeError if x_global_scale.dtype != torch.float32 else
            ValueError, "x_global_scale is {} {}: give float32 of one element", x_global_scale.dtype, list(x_global_scale.shape))
    return _forms.Fp4(x_global_scale.detach().clone().reshape(()))


def check_low_latency(most, hidden, n_experts, n_ranks, x=None, topk_idx=None, form=None, stats=None):
    require(most >= 1, ValueError, "num_max_dispatch_tokens_per_rank is {}: give 1 or more", most)
    require(n_experts >= 1 and n_experts % n_ranks == 0, ValueError,
            "num_experts is {}: give a multiple of the group's {} ranks", n_experts, n_ranks)
    if x is None:
        return
    check_shape("x", x, (torch.bfloat16, ), (None, None), "bfloat16 [tokens, hidden]")
    check_shape("topk_idx", topk_idx, _INDEX, (x.size(0), None), f"int64 [{x.size(0)}, k], a row for each of x's")
    require(x.size(0) <= most, ValueError,
            "x has {} tokens: num_max_dispatch_tokens_per_rank is {}, give no more", x.size(0), most)
    require(topk_idx.size(1) <= _native.MOST_CHOICES, ValueError, "topk_idx has {} columns: low-latency calls take up to {}",
            topk_idx.size(1), _native.MOST_CHOICES)
    if stats is not None:
        check_counts("cumulative_local_expert_recv_stats", stats, n_experts // n_ranks)
    require(hidden % form.multiple == 0, ValueError, "x has {} columns: {} needs a multiple of {}", hidden, form.argument, form.multiple)

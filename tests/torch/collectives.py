# SPDX-License-Identifier: Apache-2.0
"""Compares every collective with gloo's result: types, operators, strided and empty tensors, synchronous and asynchronous calls."""
import numpy
import torch
import torch.distributed as dist
from support import VERSION, gloo, raises, same, test

OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [torch.int8, torch.uint8, torch.int32, torch.int64]


def values(shape, dtype, rank, seed=0):
    made = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=made).bool()
    if dtype.is_complex:
        return torch.complex(torch.randn(shape, generator=made), torch.randn(shape, generator=made)).to(dtype)
    if dtype.is_floating_point:
        return torch.randint(-3, 4, shape, generator=made).to(dtype)
    return torch.randint(0, 4, shape, generator=made).to(dtype)


def with_gaps(tensor):
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def both_ways(call):
    """Runs call(async_op) synchronously and asynchronously."""
    call(False)
    work = call(True)
    assert work.wait()
    assert work.is_completed() and work.exception() is None


@test()
def all_reduce(rank, size, _):
    other = gloo()
    for dtype in FLOATS + INTS:
        for op in OPS:
            for shape in ((1,), (7,), (3, 5), (10007,), (0,)):
                mine = values(shape, dtype, rank)
                theirs = mine.clone()
                dist.all_reduce(mine, op)
                dist.all_reduce(theirs, op, group=other)
                same(mine, theirs, f"{dtype} {op} {shape}")
    for dtype in (torch.complex64, torch.complex128):
        mine = values((5,), dtype, rank)
        theirs = mine.clone()
        dist.all_reduce(mine)
        dist.all_reduce(theirs, group=other)
        same(mine, theirs, str(dtype))
    gaps = with_gaps(values((4, 3), torch.float32, rank))
    theirs = gaps.contiguous().clone()
    dist.all_reduce(theirs, group=other)
    work = dist.all_reduce(gaps, async_op=True)
    work.wait()
    same(gaps.contiguous(), theirs, "gaps")
    assert not gaps.is_contiguous() or size == 0
    column = values((4, 3), torch.float32, rank).t()
    theirs = column.contiguous().clone()
    dist.all_reduce(column)
    dist.all_reduce(theirs, group=other)
    same(column.contiguous(), theirs, "transposed")


@test()
def all_reduce_what_gloo_lacks(rank, size, _):
    every = [values((9,), torch.float32, r) for r in range(size)]
    mine = every[rank].clone()
    dist.all_reduce(mine, dist.ReduceOp.AVG)
    same(mine, torch.stack(every).mean(0), "AVG")
    mine = every[rank].clone()
    if VERSION >= (2, 13):
        dist.all_reduce(mine, dist._make_nccl_premul_sum(0.5))
        same(mine, 0.5 * torch.stack(every).sum(0), "PREMUL_SUM of a number")
        mine = every[rank].double()
        dist.all_reduce(mine, dist._make_nccl_premul_sum(torch.tensor([2.0])))
        same(mine, 2 * torch.stack(every).sum(0).double(), "PREMUL_SUM of a tensor")
    else:
        raises(ValueError, ["PREMUL_SUM", torch.__version__], lambda: dist.all_reduce(mine, dist._make_nccl_premul_sum(0.5)))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        mine = every[rank].to(dtype)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        same(mine.float(), torch.stack(every).max(0).values, str(dtype))
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        whole = [values((9,), torch.int64, r) for r in range(size)]
        mine = whole[rank].to(dtype)
        dist.all_reduce(mine)
        same(mine.to(torch.int64), torch.stack(whole).sum(0), str(dtype))
    truths = [values((9,), torch.bool, r) for r in range(size)]
    for op, fold in ((dist.ReduceOp.SUM, torch.any), (dist.ReduceOp.MAX, torch.any), (dist.ReduceOp.MIN, torch.all),
                     (dist.ReduceOp.PRODUCT, torch.all), (dist.ReduceOp.BAND, torch.all), (dist.ReduceOp.BOR, torch.any)):
        mine = truths[rank].clone()
        dist.all_reduce(mine, op)
        same(mine, fold(torch.stack(truths), 0), f"bool {op}")
    mine = truths[rank].clone()
    dist.all_reduce(mine, dist.ReduceOp.BXOR)
    same(mine, torch.stack(truths).sum(0) % 2 == 1, "bool BXOR")


@test()
def bitwise(rank, size, _):
    every = [values((2 * size,), torch.int64, r, 5) * 37 for r in range(size)]
    for op, fold in ((dist.ReduceOp.BAND, torch.bitwise_and), (dist.ReduceOp.BOR, torch.bitwise_or),
                     (dist.ReduceOp.BXOR, torch.bitwise_xor)):
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.int16):
            right = every[0].to(dtype)
            for other in every[1:]:
                right = fold(right, other.to(dtype))
            mine = every[rank].to(dtype, copy=True)
            dist.all_reduce(mine, op)
            same(mine, right, f"{op} {dtype}")
            mine = every[rank].to(dtype, copy=True)
            dist.reduce(mine, size - 1, op)
            same(mine, right if rank == size - 1 else every[rank].to(dtype), f"reduce {op} {dtype}")
            out = torch.zeros(2, dtype=dtype)
            dist.reduce_scatter_tensor(out, every[rank].to(dtype), op)
            same(out, right[2 * rank:2 * rank + 2], f"reduce_scatter {op} {dtype}")
        dist.all_reduce(torch.empty(0, dtype=torch.int32), op)
        dist.reduce(torch.empty(0, dtype=torch.int32), 0, op)
        dist.reduce_scatter_tensor(torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int32), op)


@test()
def broadcast_and_reduce(rank, size, _):
    other = gloo()
    for dtype in FLOATS + INTS + [torch.complex64, torch.bool, torch.int16, torch.float8_e5m2]:
        for root in {0, size - 1}:
            mine = values((3, 4), torch.float32, rank).to(dtype)
            right = values((3, 4), torch.float32, root).to(dtype)
            dist.broadcast(mine, root)
            same(mine.float() if dtype is torch.float8_e5m2 else mine, right.float() if dtype is torch.float8_e5m2 else right, f"{dtype}")
            gaps = with_gaps(values((3, 4), torch.float32, rank).to(dtype))
            dist.broadcast(gaps, root, async_op=True).wait()
            assert gaps.contiguous().view(torch.uint8).equal(right.contiguous().view(torch.uint8)), f"gaps {dtype}"
    for dtype in FLOATS + INTS:
        for op in OPS:
            mine = values((11,), dtype, rank)
            theirs = mine.clone()
            dist.reduce(mine, size - 1, op)
            dist.reduce(theirs, size - 1, op, group=other)
            if rank == size - 1:
                same(mine, theirs, f"{dtype} {op}")
            else:
                same(mine, values((11,), dtype, rank), "what is not the root's stays")


@test()
def gathers(rank, size, _):
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16, torch.int16):
        every = [values((3, 2), dtype, r) for r in range(size)]

        def lists(async_op):
            out = [torch.zeros(3, 2, dtype=dtype) for _ in range(size)]
            work = dist.all_gather(out, every[rank], async_op=async_op)
            if work is not None:
                work.wait()
            same(out, every, f"all_gather {dtype}")
            return work

        both_ways(lists)
        out = torch.zeros(3 * size, 2, dtype=dtype)
        dist.all_gather_into_tensor(out, with_gaps(every[rank]))
        same(out, torch.cat(every), f"into a tensor {dtype}")
        wide = with_gaps(torch.zeros(3 * size, 2, dtype=dtype))
        dist.all_gather_into_tensor(wide, every[rank], async_op=True).wait()
        same(wide.contiguous(), torch.cat(every), "into gaps")
        whole = torch.zeros(3 * size, 2, dtype=dtype)
        whole[3 * rank:3 * rank + 3] = every[rank]
        dist.all_gather_into_tensor(whole, whole[3 * rank:3 * rank + 3])
        same(whole, torch.cat(every), "in place")
        pieces = list(torch.zeros(3 * size, 2, dtype=dtype).chunk(size))
        dist.all_gather(pieces, every[rank])
        same(pieces, every, "pieces of one tensor")
        for root in {0, size - 1}:
            out = [torch.zeros(3, 2, dtype=dtype) for _ in range(size)] if rank == root else None
            dist.gather(every[rank], out, dst=root)
            if rank == root:
                same(out, every, "gather")
            got = with_gaps(torch.zeros(3, 2, dtype=dtype))
            dist.scatter(got, [every[root] * (r + 1) if dtype is not torch.bool else every[r] for r in range(size)] if rank == root else None,
                         src=root, async_op=True).wait()
            same(got.contiguous(), every[root] * (rank + 1) if dtype is not torch.bool else every[rank], "scatter")
            if not hasattr(dist, "gather_single"):
                continue
            out = torch.zeros(3 * size if rank == root else 0, 2, dtype=dtype)
            both_ways(lambda async_op: dist.gather_single(every[rank], out, dst=root, async_op=async_op))
            if rank == root:
                same(out, torch.cat(every), "gather_single")
    empty = [torch.zeros(0, 4) for _ in range(size)]
    dist.all_gather(empty, torch.zeros(0, 4))


@test(2, 3, 4)
def lists_of_different_sizes(rank, size, _):
    for dtype in (torch.float32, torch.int16, torch.complex64):
        every = [values((r % 3, 2), dtype, r) for r in range(size)]  # that of rank 0 is empty
        for async_op in (False, True):
            out = [torch.zeros_like(e) for e in every]
            out[-1] = with_gaps(out[-1])
            work = dist.all_gather(out, with_gaps(every[rank]), async_op=async_op)
            if async_op:
                work.wait()
            same([o.contiguous() for o in out], every, f"all_gather {dtype}")
    own = [torch.zeros_like(e) for e in every]
    own[rank] = every[rank].clone()
    dist.all_gather(own, own[rank])
    same(own, every, "in place")
    for op, dtype in ((dist.ReduceOp.SUM, torch.float32), (dist.ReduceOp.AVG, torch.float64), (dist.ReduceOp.MAX, torch.int64),
                      (dist.ReduceOp.BOR, torch.int32)):
        lists = [[values((s % 3 + 1,), dtype, r, s) for s in range(size)] for r in range(size)]
        columns = torch.stack([one[rank] for one in lists])
        right = {dist.ReduceOp.SUM: columns.sum(0), dist.ReduceOp.AVG: columns.sum(0) / size, dist.ReduceOp.MAX: columns.amax(0)}.get(
            op, torch.from_numpy(numpy.bitwise_or.reduce(columns.numpy())) if op == dist.ReduceOp.BOR else None)
        for async_op in (False, True):
            out = with_gaps(torch.zeros(rank % 3 + 1, dtype=dtype))
            work = dist.reduce_scatter(out, lists[rank], op, async_op=async_op)
            if async_op:
                work.wait()
            same(out.contiguous(), right, f"reduce_scatter {op}")
    raises(ValueError, ["all_gather", "elements"], lambda: dist.all_gather([torch.zeros(r + 1) for r in range(size)], torch.zeros(9)))
    uneven = [torch.zeros(r + 1) for r in range(size)]
    raises(ValueError, ["reduce_scatter", "output of 9"], lambda: dist.reduce_scatter(torch.zeros(9), uneven))


@test()
def reduce_scatters(rank, size, _):
    for dtype in FLOATS + INTS:
        every = [values((size, 5), dtype, r) for r in range(size)]
        right = torch.stack(every).float().sum(0)[rank].to(dtype)
        for async_op in (False, True):
            out = torch.zeros(5, dtype=dtype)
            work = dist.reduce_scatter(out, list(every[rank]), async_op=async_op)
            if async_op:
                work.wait()
            same(out, right, f"list {dtype}")
            out = with_gaps(torch.zeros(5, dtype=dtype))
            work = dist.reduce_scatter_tensor(out, with_gaps(every[rank]).reshape(-1), async_op=async_op)
            if async_op:
                work.wait()
            same(out.contiguous(), right, f"tensor {dtype}")
    average = torch.zeros(5)
    dist.reduce_scatter_tensor(average, torch.full((5 * size,), float(rank)), dist.ReduceOp.AVG)
    same(average, torch.full((5,), (size - 1) / 2), "AVG")


@test()
def all_to_alls(rank, size, _):
    for dtype in (torch.float32, torch.int64, torch.complex64, torch.bool, torch.int16):
        every = [values((size, 3), dtype, r) for r in range(size)]
        right = torch.stack([e[rank] for e in every])
        out = torch.zeros(size, 3, dtype=dtype)
        dist.all_to_all_single(out, every[rank])
        same(out, right, f"even {dtype}")
        rows = [[(r + 2 * s) % 3 for s in range(size)] for r in range(size)]  # rank r sends rows[r][s] rows to s
        source = torch.cat([torch.full((rows[rank][s], 2), 10 * rank + s).to(dtype) for s in range(size)])
        wanted = torch.cat([torch.full((rows[r][rank], 2), 10 * r + rank).to(dtype) for r in range(size)])
        takes = [rows[r][rank] for r in range(size)]
        for async_op in (False, True):
            out = with_gaps(torch.zeros(sum(takes), 2, dtype=dtype))
            work = dist.all_to_all_single(out, source, takes, rows[rank], async_op=async_op)
            if async_op:
                work.wait()
            same(out.contiguous(), wanted, f"uneven {dtype}")
        out = torch.zeros(sum(takes), 2, dtype=dtype)
        dist.all_to_all_single(out, source, numpy.array(takes), numpy.array(rows[rank]))
        same(out, wanted, f"sizes in arrays {dtype}")
        out = torch.zeros(size, 3, dtype=dtype)
        splits = [1] * size if rank % 2 else None  # each rank chooses its form
        dist.all_to_all_single(out, every[rank], splits, splits)
        same(out, right, f"even, in two forms {dtype}")
        outs = [torch.zeros(n, 2, dtype=dtype) for n in takes]
        dist.all_to_all(outs, list(source.split(rows[rank])))
        same(torch.cat(outs), wanted, f"lists {dtype}")


@test()
def coalesced(rank, size, _):
    tensors = [values((n,), torch.float32, rank, n) for n in (3, 1, 70000)] + [torch.full((4,), rank + 1)]
    right = [sum(values((n,), torch.float32, r, n) for r in range(size)) for n in (3, 1, 70000)]
    right.append(torch.full((4,), size * (size + 1) // 2))
    options = dist.AllreduceCoalescedOptions()
    dist.distributed_c10d._get_default_group().allreduce_coalesced(tensors, options).wait()
    same(tensors, right, "allreduce_coalesced")
    few = [torch.full((3,), float(rank)), with_gaps(torch.full((2,), 2.0 * rank))]
    with dist._coalescing_manager(async_ops=True) as manager:
        for t in few:
            dist.all_reduce(t)
    manager.wait()
    total = size * (size - 1) / 2
    same([t.contiguous() for t in few], [torch.full((3,), total), torch.full((2,), 2 * total)], "coalescing manager")
    outs, parts = [torch.zeros(2 * size), torch.zeros(size)], [torch.full((2,), 1.0 + rank), torch.full((1,), 5.0 * rank)]
    with dist._coalescing_manager():
        for o, p in zip(outs, parts):
            dist.all_gather_into_tensor(o, p)
    same(outs, [torch.arange(1.0, size + 1).repeat_interleave(2), 5 * torch.arange(0.0, size)], "gathers")
    outs = [torch.zeros(2), torch.zeros(1)]
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(outs[0], torch.ones(2 * size))
        dist.reduce_scatter_tensor(outs[1], torch.arange(float(size)))
    same(outs, [torch.full((2,), float(size)), torch.full((1,), float(size * rank))], "reduce_scatters")


@test()
def sparse(rank, size, _):
    index = torch.tensor([[0, rank + 1, rank + 1], [rank, 0, 0]])
    mine = torch.sparse_coo_tensor(index, torch.tensor([1.0, 2.0, 3.0]), (6, 5))
    right = sum(torch.sparse_coo_tensor(torch.tensor([[0, r + 1, r + 1], [r, 0, 0]]), torch.tensor([1.0, 2.0, 3.0]), (6, 5)).to_dense()
                for r in range(size))
    dist.all_reduce(mine)
    same(mine.to_dense(), right, "sparse")
    raises(ValueError, ["MAX: give torch.sparse_coo and SUM"], lambda: dist.all_reduce(mine, op=dist.ReduceOp.MAX))


@test()
def default_device(rank, size, _):
    """What the backend makes for itself is on the CPU wherever torch makes tensors by default."""
    mine = torch.full((3,), rank + 1.0)
    indices = torch.tensor([[rank, size]])
    scattered = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (size + 1,))
    byte, got = torch.zeros(0), torch.ones(0)
    torch.set_default_device("meta")
    try:
        dist.barrier(dist.new_group(backend="moeccl"))
        group, options = dist.group.WORLD, dist.AllreduceOptions()  # torch's functions turn the default device off
        for tensor in (mine, scattered):
            group.allreduce([tensor], options).wait()
        scaled = torch.ones(1, device="cpu")
        if VERSION >= (2, 13):
            options.reduceOp = dist._make_nccl_premul_sum(2.0)
        group.allreduce([scaled], options).wait()
        work = group.recv([got], rank, 0)
        group.send([byte], rank, 0).wait()
        work.wait()
    finally:
        torch.set_default_device(None)
    same(mine, torch.full((3,), size * (size + 1) / 2))
    same(scattered.to_dense(), torch.tensor([1.0] * size + [2.0 * size]))
    same(scaled, torch.tensor([(2.0 if VERSION >= (2, 13) else 1.0) * size]))


@test()
def objects(rank, size, _):
    every = [None] * size
    dist.all_gather_object(every, {"rank": rank, "text": "x" * (100 * rank)})
    assert [e["rank"] for e in every] == list(range(size))
    said = [rank, "a" * rank]
    dist.broadcast_object_list(said, src=size - 1)
    assert said == [size - 1, "a" * (size - 1)]
    out = [None]
    dist.scatter_object_list(out, [f"for {r}" for r in range(size)] if rank == 0 else None)
    assert out == [f"for {rank}"]


@test()
def functional(rank, size, _):
    import torch.distributed._functional_collectives as fc
    group = dist.group.WORLD
    same(fc.wait_tensor(fc.all_reduce(torch.ones(3) * rank, "sum", group)), torch.full((3,), size * (size - 1) / 2))
    same(fc.wait_tensor(fc.all_gather_tensor(torch.full((2,), float(rank)), 0, group)), torch.arange(float(size)).repeat_interleave(2))
    same(fc.wait_tensor(fc.reduce_scatter_tensor(torch.ones(2 * size), "sum", 0, group)), torch.full((2,), float(size)))
    even = fc.wait_tensor(fc.all_to_all_single(torch.arange(float(size)) + 10 * rank, None, None, group))
    same(even, 10 * torch.arange(float(size)) + rank)


@test(2)
def results_of_functional_collectives(rank, size, _):
    """They stand for a tensor that they wait for at its first use, and have no memory of their own."""
    import torch.distributed._functional_collectives as fc

    def summed(n=3):
        return fc.all_reduce(torch.full((n,), rank + 1.0), "sum", dist.group.WORLD)

    if type(summed()) is torch.Tensor:
        return  # a torch that returns the tensor itself
    for async_op in (False, True):
        twice = summed()
        work = dist.all_reduce(twice, async_op=async_op)
        if async_op:
            work.wait()
        same(twice + 0, torch.full((3,), 6.0))
        out = [torch.zeros(3) for _unused in range(size)]
        work = dist.all_gather(out, summed(), async_op=async_op)
        if async_op:
            work.wait()
        same(out, [torch.full((3,), 3.0)] * size)
    whole = torch.zeros(6)
    dist.all_gather_into_tensor(whole, summed())
    same(whole, torch.full((6,), 3.0))
    dist.all_to_all([out[0][:2], out[1][:2]], [summed(2), summed(2)])
    got = summed(3)
    if rank == 0:
        for n in (3, 50_000):
            dist.send(summed(n), 1)
        dist.send(torch.full((3,), 7.0), 1)
    else:
        for n in (3, 50_000):
            same(summed(n) + 0, torch.full((n,), 3.0))
            t = torch.zeros(n)
            dist.recv(t, 0)
            same(t, torch.full((n,), 3.0))
        dist.recv(got, 0)
        same(got + 0, torch.full((3,), 7.0))
    if VERSION >= (2, 5):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate
        spread = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (size,)), [Replicate()])
        for call in (dist.all_reduce, lambda t: dist.send(t, 1 - rank), lambda t: dist.recv(t, 1 - rank)):
            raises(TypeError, ["DTensor", "to_local"], lambda call=call: call(spread))


@test(2, 3)
def what_torch_negates_when_it_is_read(rank, size, _):
    """The memory of such a view has other numbers than the view; as an output it is like one with gaps."""
    def negated(values):
        view = torch._neg_view(-values)
        assert view.is_neg() and view.is_contiguous()
        return view

    def numbers(n):
        return negated(torch.arange(1.0, n + 1) * (rank + 1))

    every = [torch.arange(1.0, size + 1) * (r + 1) for r in range(size)]
    total, right = torch.stack(every).sum(0), (rank + 1) % size
    for asynchronous in (False, True):
        def done(call, *arguments, asynchronous=asynchronous, **named):
            work = call(*arguments, async_op=asynchronous, **named)
            if work is not None:
                work.wait()

        for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / size)):
            mine = numbers(size)
            done(dist.all_reduce, mine, op)
            same(mine, expected, f"all_reduce {op}")
        mine = numbers(size)
        done(dist.reduce, mine, size - 1)
        same(mine, total if rank == size - 1 else every[rank], "reduce")
        mine = numbers(size)
        done(dist.broadcast, mine, size - 1)
        same(mine, every[-1], "broadcast")
        out = negated(torch.zeros(size * size))
        done(dist.all_gather_into_tensor, out, numbers(size))
        same(out, torch.cat(every), "all_gather_into_tensor")
        parts = [numbers(size) for _unused in range(size)]
        done(dist.all_gather, parts, numbers(size))
        same(parts, every, "all_gather")
        parts = [numbers(size) for _unused in range(size)] if rank == 0 else None
        done(dist.gather, numbers(size), parts, dst=0)
        assert rank or same(parts, every, "gather") is None
        mine = numbers(size)
        done(dist.scatter, mine, [numbers(size) for _unused in range(size)] if rank == 0 else None, src=0)
        same(mine, every[0], "scatter")
        mine = numbers(size)[:1]
        done(dist.reduce_scatter_tensor, mine, numbers(size))
        same(mine, total[rank:rank + 1], "reduce_scatter_tensor")
        mine = numbers(size)
        done(dist.all_to_all_single, mine, numbers(size))
        same(mine, torch.stack(every)[:, rank], "all_to_all_single")
        mine = numbers(size)
        works = [dist.isend(numbers(size), right), dist.irecv(mine, (rank - 1) % size)]
        for work in works:
            work.wait()
        same(mine, every[rank - 1], "irecv")
    x = torch.tensor([1 + 1j, 2 - 2j]) * (rank + 1)
    parts = [torch.zeros_like(x) for _unused in range(size)] if rank == 0 else None
    dist.gather(x.conj(), parts)
    assert rank or same(parts, [torch.tensor([1 - 1j, 2 + 2j]) * (r + 1) for r in range(size)]) is None
    group = dist.distributed_c10d._get_default_group()
    mine = x.conj()
    group.allreduce([mine]).wait()
    same(mine, torch.tensor([1 - 1j, 2 + 2j]) * sum(range(1, size + 1)))
    mine = [x.conj(), x.clone().conj()[:1]]
    group.allreduce_coalesced(mine, dist.AllreduceCoalescedOptions()).wait()
    same(mine[1], mine[0][:1])


@test(2)
def outputs_whose_elements_share_memory(rank, size, _):
    """They are refused before any rank communicates; as an input one is fine."""
    def shared():
        return torch.ones(1).expand(4)

    words = ["shape (4,)", "share memory", "contiguous()"]
    group = dist.distributed_c10d._get_default_group()
    for call in (dist.all_reduce, lambda t: dist.all_reduce(t, dist.ReduceOp.AVG), lambda t: dist.broadcast(t, 0) if rank else dist.recv(t, 1),
                 lambda t: dist.reduce_scatter_tensor(t, torch.ones(8)), lambda t: dist.all_to_all_single(t, torch.ones(4)),
                 lambda t: dist.all_gather([t, torch.ones(4)], torch.ones(4)),
                 lambda t: group.allreduce_coalesced([torch.ones(2), t], dist.AllreduceCoalescedOptions())):
        raises(ValueError, words, lambda call=call: call(shared()))
    raises(ValueError, words, lambda: dist.all_reduce(torch.ones(1, dtype=torch.int16).expand(4)))
    out = torch.zeros(8)
    dist.all_gather_into_tensor(out, shared())
    same(out, torch.ones(8))


@test(2)
def refusals(rank, size, _):
    raises(TypeError, ["BAND", "float32", "integers"], lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND))
    group = dist.distributed_c10d._get_default_group()
    raises(ValueError, ["output", "4", "2 ranks"], lambda: dist.all_gather_into_tensor(torch.zeros(4), torch.zeros(4)))
    raises(ValueError, ["split"], lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3)))
    two, four = [torch.zeros(2)], [torch.zeros(4), torch.zeros(4)]
    raises(ValueError, ["reduce_scatter", "1 output", "2 input"], lambda: group.reduce_scatter_tensor_coalesced(two, four))
    raises(ValueError, ["all_gather", "2 output", "1 input"], lambda: group.allgather_into_tensor_coalesced(four, two))
    options = dist.AllreduceCoalescedOptions()
    raises(ValueError, ["cpu", "meta"], lambda: group.allreduce_coalesced([torch.zeros(2), torch.zeros(2, device="meta")], options))
    raises(ValueError, ["meta"], lambda: group.allreduce([torch.zeros(3, device="meta")]))
    raises(TypeError, ["whole_number", "topology"], lambda: dist.new_group(pg_options=__import__("moeccl").distributed.Options(whole_number=1)))
    work = dist.all_reduce(torch.ones(2), async_op=True)
    raises(RuntimeError, ["source"], work.source_rank)
    work.wait()
    dist.barrier()

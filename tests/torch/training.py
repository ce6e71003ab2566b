# SPDX-License-Identifier: Apache-2.0
"""DDP and FSDP2 around a small model must give the same weights as one process with the whole batch."""
import os
import signal

import torch
import torch.distributed as dist
from support import gloo, raises, same, test
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def batches(size):
    torch.manual_seed(4)
    return [torch.randn(4 * size, 16) for _ in range(STEPS)]


def alone(size):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in batches(size):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def train(net, rank, size):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in batches(size):
        optimizer.zero_grad()
        net(batch[4 * rank:4 * rank + 4]).square().mean().backward()
        optimizer.step()


@test()
def ddp(rank, size, _):
    for options in ({}, {"bucket_cap_mb": 0.01}, {"gradient_as_bucket_view": True, "static_graph": True}):
        net = DistributedDataParallel(model(), **options)
        train(net, rank, size)
        same([p.detach() for p in net.parameters()], alone(size), str(options))


@test(2)
def ddp_hooks(rank, size, _):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    net = DistributedDataParallel(model())
    net.register_comm_hook(None, default_hooks.allreduce_hook)
    train(net, rank, size)
    same([p.detach() for p in net.parameters()], alone(size), "hook")
    net = DistributedDataParallel(model())
    net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(net, rank, size)
    torch.testing.assert_close([p.detach() for p in net.parameters()], alone(size), rtol=0.02, atol=0.005)
    net = DistributedDataParallel(model())
    with net.no_sync():
        net(torch.ones(1, 16)).sum().backward()
    net(torch.ones(1, 16)).sum().backward()
    buffered = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
    DistributedDataParallel(buffered)(torch.randn(6, 16)).sum().backward()


def backward_after_a_kill(rank, hook=None):
    """Rank 1 dies between two steps, which rank 0's backward pass reports."""
    net = DistributedDataParallel(model())
    if hook is not None:
        net.register_comm_hook(None, hook)
    net(torch.ones(4, 16)).sum().backward()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raises(RuntimeError, ["rank 1"], lambda: net(torch.ones(4, 16)).sum().backward())
    dist.group.WORLD.abort()


@test(2, status={1: -signal.SIGKILL})
def ddp_with_a_lost_rank(rank, size, _):
    backward_after_a_kill(rank)


@test(2, status={1: -signal.SIGKILL})
def ddp_with_a_hook_and_a_lost_rank(rank, size, _):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    backward_after_a_kill(rank, default_hooks.allreduce_hook)


@test(2)
def ddp_uneven(rank, size, _):
    net = DistributedDataParallel(model())
    with net.join():
        for _unused in range(3 + rank):
            net(torch.ones(2, 16)).sum().backward()


@test(since=(2, 7), what="FSDP2 on the CPU")
def fsdp2(rank, size, _):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (size,))
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, rank, size)
    same([p.full_tensor().detach() for p in net.parameters()], alone(size), "FSDP2")


@test(2, since=(2, 5), what="torch.distributed.tensor")
def dtensor(rank, size, _):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(12.0).reshape(4, 3)
    spread = distribute_tensor(whole, mesh, [Shard(0)])
    same(spread.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    same(spread.redistribute(mesh, [Replicate()]).to_local(), whole)
    total = spread.sum()
    same(total.full_tensor(), whole.sum())


@test(2)
def moe_layer(rank, size, _):
    """A model with a layer of experts, in DDP, comes to the same weights on a group of moeccl as on one of gloo."""
    import moeccl.torch as mt

    def trained(group):
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(16, 16), mt.MoELayer(16, 4, 2, ffn=32, max_tokens=8, seed=1, group=group), nn.Linear(16, 4))
        net = DistributedDataParallel(mt.ignore_experts(net), process_group=group)
        train(net, rank, size)
        return [p.detach() for p in net.parameters()]

    same(trained(dist.group.WORLD), trained(gloo()), "MoELayer")
    mt.close()


@test(2)
def training_checkpoint(rank, size, where):
    import torch.distributed.checkpoint as dcp
    net = DistributedDataParallel(model())
    state = {"net": net.module.state_dict()}
    dcp.save(state, checkpoint_id=where + "_checkpoint")
    dist.barrier()
    dcp.load(state, checkpoint_id=where + "_checkpoint")
    same(list(state["net"].values()), list(model().state_dict().values()))

# SPDX-License-Identifier: Apache-2.0
import torch
import torch.distributed as dist
import moeccl.torch

dist.init_process_group("moeccl")                                         # reads torchrun's RANK, WORLD_SIZE, ...
ffn = moeccl.torch.MoELayer(hidden=256, n_experts=8, top_k=2, ffn=1024)   # in place of a dense block
x = torch.randn(64, 256, requires_grad=True)
y = x + ffn(x)                                                            # dispatch, this rank's experts, combine
y.square().mean().backward()                                              # gradients of tokens, experts and router
print(f"rank {dist.get_rank()}: |gradient of x| = {x.grad.norm():.3f}")
dist.destroy_process_group()

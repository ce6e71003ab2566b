#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a 4-layer pre-LN transformer with a MoE block in each layer on CPU ranks, with MoECCL or, for comparison, with the usual MoE
implementation: sorting and all_to_all_single over torch.distributed's gloo.

    torchrun --nproc-per-node 4 examples/pytorch_moe.py                       # MoECCL
    torchrun --nproc-per-node 4 examples/pytorch_moe.py --backend gloo        # the same model with all_to_all_single
    torchrun --nproc-per-node 4 examples/pytorch_moe.py --backend both        # alternates both: compares losses, shows times side by side
    torchrun --nproc-per-node 4 examples/pytorch_moe.py --backend both --same-choices   # compares losses where rounding decides no choice
    torchrun --nproc-per-node 4 examples/pytorch_moe.py --backend both --topology 'node:2(bw=0.25GB/s,lat=20us) gpu:2' --pace   # EMULATED links
    perf/compare_net --rate 2gbit --ranks 2+2 --run python3 $PWD/examples/pytorch_moe.py --backend both   # two hosts (namespaces), needs root

The model has 8 experts with top-2 routing, a shared expert and hidden size 256. It learns sequences of a synthetic language: a fixed table
gives each token from the two before it, except that one token in ten is random. All models start from the same weights and read the same
batches, so their losses agree to rounding until two of a token's scores are so close that rounding decides between experts. From then on the
float32 curves differ by about 1e-3. With --dtype float64 that does not happen, nor with --same-choices, where MoECCL's tokens go to the experts
that gloo's have chosen."""
import argparse
import importlib.util
import json
import os
import socket
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

VOCABULARY = 64


class AllToAllMoE(nn.Module):
    """The MoE layer of a program without an expert-parallel library: sort the copies of tokens by expert, exchange counts, exchange rows,
    run the experts, exchange back, weight and sum. Router, experts and their initialisation come from moeccl.torch. The exchange uses gloo
    or, over a paced communicator, MoECCL's plain AllToAllv ("flat"), because gloo's links cannot be slowed."""

    def __init__(self, hidden, n_experts, top_k, ffn, shared_expert, aux_loss_weight, seed, comm=None):
        super().__init__()
        from moeccl.torch import MLP, Experts, Router
        self.n_experts, self.top_k, self.hidden, self.aux_loss_weight = n_experts, top_k, hidden, aux_loss_weight
        self.size, self.share = dist.get_world_size(), n_experts // dist.get_world_size()
        self.router = Router(hidden, n_experts, top_k)
        first = dist.get_rank() * self.share
        self.experts = Experts(lambda: MLP(hidden, ffn), list(range(first, first + self.share)), seed)
        self.shared_expert = MLP(hidden, shared_expert)
        for p in self.experts.stacked():
            p.register_hook(lambda grad: grad / self.size)
        self.loss, self.comm, self.chosen = None, comm, None

    def forward(self, x):
        tokens = x.reshape(-1, self.hidden)
        weights, index, loss = self.router(tokens)
        self.chosen = index
        self.loss = self.aux_loss_weight * loss
        order = index.reshape(-1).argsort(stable=True)
        counts = torch.bincount(index.reshape(-1), minlength=self.n_experts)
        theirs = torch.empty_like(counts)
        exchange(theirs, counts, [self.share] * self.size, [self.share] * self.size, self.comm)
        theirs = theirs.view(self.size, self.share)
        sent, got = counts.view(self.size, self.share).sum(1).tolist(), theirs.sum(1).tolist()
        rows = AllToAll.apply(tokens[order // self.top_k], sent, got, self.comm)
        # Reorders the rows from (source, expert) to (expert, source), and back after the experts.
        pieces = rows.split(theirs.reshape(-1).tolist())
        by_expert = [torch.cat(pieces[e::self.share]) for e in range(self.share)]
        out = self.experts(torch.cat(by_expert), [len(part) for part in by_expert])
        pieces = out.split(theirs.t().reshape(-1).tolist())
        back = torch.cat([pieces[e * self.size + r] for r in range(self.size) for e in range(self.share)])
        back = AllToAll.apply(back, got, sent, self.comm)
        weighted = back * weights.reshape(-1)[order, None]
        y = torch.zeros_like(tokens).index_add(0, order // self.top_k, weighted)
        return (y + self.shared_expert(tokens)).view(x.shape)


def exchange(out, rows, sent, got, comm):
    """Sends sent[r] rows to rank r and receives got[r] rows from it, as all_to_all_single does."""
    if comm is None:
        dist.all_to_all_single(out, rows, got, sent)
    else:
        width = rows[0].numel() if len(rows) else out[0].numel() if len(out) else 1
        comm.all_to_allv(rows, [n * width for n in sent], out, [n * width for n in got])


class AllToAll(torch.autograd.Function):
    """The exchange and its gradient, which is the reverse exchange."""

    @staticmethod
    def forward(ctx, rows, sent, got, comm):
        ctx.sent, ctx.got, ctx.comm = sent, got, comm
        out = rows.new_empty((sum(got), rows.shape[1]))
        exchange(out, rows.contiguous(), sent, got, comm)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty((sum(ctx.sent), grad.shape[1]))
        exchange(out, grad.contiguous(), ctx.got, ctx.sent, ctx.comm)
        return out, None, None, None


class Block(nn.Module):
    def __init__(self, hidden, heads, moe):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.moe = moe

    def forward(self, x):
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.moe(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, options, make_moe):
        super().__init__()
        torch.manual_seed(options.seed)
        hidden = options.hidden
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.position = nn.Parameter(0.02 * torch.randn(options.length, hidden))
        self.blocks = nn.ModuleList(Block(hidden, hidden // 64, make_moe(1000 * layer)) for layer in range(options.layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Following:
    """Makes a layer's router choose the experts that the leader, an AllToAllMoE, has chosen for the same tokens, with weights of its own."""

    def __init__(self, router, leader):
        self.own, self.leader, self.n_other, self.n_tokens = router.choose, leader, 0, 0
        router.choose = self.choose

    def choose(self, probabilities):
        own, theirs = self.own(probabilities), self.leader.chosen
        self.n_other += int((own.sort(1).values != theirs.sort(1).values).any(1).sum())
        self.n_tokens += len(own)
        return theirs


def make_model(options, backend):
    """Builds the model of a backend. Only the MoE layers differ."""
    shape = {"hidden": options.hidden, "n_experts": options.experts, "top_k": options.top_k, "ffn": options.ffn,
             "shared_expert": options.ffn, "aux_loss_weight": 0.01}
    from moeccl.torch import MoELayer, comm_of
    links = {"topology": options.topology, "pace": int(options.pace)} if options.topology else {}
    if backend == "gloo":
        comm = comm_of(None, name="plain", **links) if options.pace else None
        return Transformer(options, lambda seed: AllToAllMoE(**shape, seed=seed, comm=comm))
    more = {"max_tokens": options.batch * options.length, "algorithm": options.algorithm, "comm_options": links,
            "dispatch_dtype": torch.float8_e4m3fn if options.float8 else None}
    return Transformer(options, lambda seed: MoELayer(**shape, seed=seed, **more))


def batches(options):
    """Yields this rank's batches, the same in every run. A table of the last two tokens gives the next one, except for one in ten."""
    table = torch.randint(0, VOCABULARY, (VOCABULARY, VOCABULARY), generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(17 + dist.get_rank())
    while True:
        tokens = torch.randint(0, VOCABULARY, (options.batch, options.length + 1), generator=g)
        chance = torch.rand(tokens.shape, generator=g) < 0.1
        for t in range(2, options.length + 1):
            tokens[:, t] = torch.where(chance[:, t], tokens[:, t], table[tokens[:, t - 2], tokens[:, t - 1]])
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Run:
    """A model in training, with its losses and the milliseconds of its steps on this rank."""

    def __init__(self, options, backend):
        from moeccl.torch import ignore_experts
        self.model = make_model(options, backend)
        group = None
        if backend == "moeccl" and options.sums == "moeccl":
            import moeccl.distributed  # torch's entry point does the same in init_process_group("moeccl")
            group = dist.new_group(backend="moeccl")
        self.wrapped = DistributedDataParallel(ignore_experts(self.model), process_group=group)
        self.optimizer = torch.optim.AdamW(self.wrapped.parameters(), lr=1e-3)
        self.data, self.losses, self.times = batches(options), [], []

    def step(self):
        tokens, targets = next(self.data)
        dist.barrier()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = cross_entropy(self.wrapped(tokens).view(-1, VOCABULARY), targets.view(-1))
        extra = [b.moe.loss for b in self.model.blocks if getattr(b.moe, "loss", None) is not None]
        (loss + sum(extra)).backward()
        self.optimizer.step()
        self.times.append(1000 * (time.perf_counter() - begin))
        self.losses.append(loss.item())

    def result(self):
        """Returns, for each step, the mean loss of all ranks and the time of the slowest rank."""
        losses, times = (torch.tensor(values, dtype=torch.float64) for values in (self.losses, self.times))
        dist.all_reduce(losses)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return (losses / dist.get_world_size()).tolist(), times.tolist()


def median(values):
    return sorted(values)[len(values) // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["moeccl", "gloo", "both"], default="moeccl")
    for name, value in (("steps", 200), ("layers", 4), ("hidden", 256), ("ffn", 512), ("experts", 8), ("top-k", 2), ("batch", 4),
                        ("length", 64), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="type of parameters and rows")
    parser.add_argument("--float8", action="store_true", help="MoECCL dispatches rows in 8 bits with a scale for each 128 elements")
    parser.add_argument("--algorithm", default="auto", help="algorithm of MoECCL's dispatch and combine")
    parser.add_argument("--topology", help="topology of MoECCL's communicator, such as 'node:2(bw=0.25GB/s) gpu:2' (default: detected)")
    parser.add_argument("--pace", action="store_true", help="slow MoECCL's links to the topology's figures (EMULATED)")
    parser.add_argument("--sums", choices=["moeccl", "gloo"],
                        default="moeccl" if importlib.util.find_spec("moeccl.distributed") else "gloo",
                        help="backend that sums the gradients of all other parameters (DDP) in MoECCL's run; the other run uses gloo")
    parser.add_argument("--same-choices", action="store_true", help="MoECCL's tokens go to the experts that gloo's have chosen (--backend both)")
    parser.add_argument("--explain", action="store_true", help="print the plan of the first block's last routing")
    parser.add_argument("--json", help="write losses and times to this file")
    options = parser.parse_args()
    if options.pace and not options.topology:
        parser.error("--pace needs --topology, whose figures it keeps to")
    if options.same_choices and options.backend != "both":
        parser.error("--same-choices needs --backend both: it takes the choices of gloo's run")
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, options.dtype))
    if socket.gethostname().startswith("moeccl-host"):  # perf/compare_net's namespaces
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    dist.init_process_group("gloo")
    runs = {b: Run(options, b) for b in (("gloo", "moeccl") if options.backend == "both" else (options.backend,))}
    if options.same_choices:
        following = [Following(mine.moe.router, leader.moe) for mine, leader in zip(runs["moeccl"].model.blocks, runs["gloo"].model.blocks)]
    for _ in range(options.steps):
        for run in runs.values():  # alternates, so that both runs see the same load of the machine
            run.step()
    results = {backend: run.result() for backend, run in runs.items()}
    if dist.get_rank() == 0:
        for backend, (losses, times) in results.items():
            print(f"{backend}: loss {losses[0]:.6f} at the first step, {losses[-1]:.6f} at the last; "
                  f"{median(times[len(times) // 10:]):.1f} ms a step (median of the slowest rank)", flush=True)
        if options.explain and "moeccl" in runs:
            print(runs["moeccl"].model.blocks[0].moe.handle.explain())
    if len(results) == 2 and dist.get_rank() == 0:
        apart = max(abs(a - b) / abs(a) for a, b in zip(results["gloo"][0], results["moeccl"][0]))
        fast, slow = (median(results[b][1][len(results[b][1]) // 10:]) for b in ("moeccl", "gloo"))
        print(f"losses differ by at most {apart:.2e} (relative, {options.steps} steps); gloo / moeccl: {slow / fast:.2f}", flush=True)
    if options.same_choices:
        counts = torch.tensor([[f.n_other, f.n_tokens] for f in following]).sum(0)
        dist.all_reduce(counts)
        if dist.get_rank() == 0:
            print(f"{counts[0]} of {counts[1]} times a token's own choice would have been another", flush=True)
    if options.json and dist.get_rank() == 0:
        with open(options.json, "w", encoding="utf-8") as out:
            json.dump({b: {"losses": r[0], "ms": r[1]} for b, r in results.items()}, out)
    from moeccl.torch import close
    close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

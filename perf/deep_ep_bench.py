# SPDX-License-Identifier: Apache-2.0
"""Compares deep_ep's dispatch and combine with the same operations on gloo's all_to_all_single, on CPU tensors.

    PYTHONPATH=build/bindings/python:bindings/deep_ep python3 perf/deep_ep_bench.py [--num-processes 4] [--num-tokens 4096] ...

Seven implementations take turns: deep_ep's Buffer; its ElasticBuffer, without and with do_expand; its HybridEPBuffer, without and
with permutation; gloo with a row for each pair of token and rank, as deep_ep sends them; gloo with a row for each choice, as the
all-to-all dispatchers of training frameworks send them. A figure is the median of --runs runs, each of which counts the slowest rank.
Dispatch transfers rows, choices and weights; combine sums rows. Results are compared before the timing. --processor-time counts that of
the calling thread instead, which other jobs on the machine hardly change; it leaves out gloo's threads."""
import argparse
import statistics
import tempfile
import time

import deep_ep
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


class DeepEp:
    name = "deep_ep"

    def __init__(self, group, args):
        self.buffer, self.n_experts = deep_ep.Buffer(group, explicitly_destroy=True), args.num_experts

    def dispatch(self, x, idx, weights):
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(idx, self.n_experts)
        rows, _, _, _, self.handle, _ = self.buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert)
        return rows

    def combine(self, rows):
        return self.buffer.combine(rows, self.handle)[0]


class Elastic:
    name, expand = "deep_ep, V2", False

    def __init__(self, group, args):
        self.buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=args.num_tokens, hidden=args.hidden, explicitly_destroy=True)
        self.n_experts = args.num_experts

    def dispatch(self, x, idx, weights):
        rows, _, _, self.handle, _ = self.buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=self.n_experts,
                                                          do_expand=self.expand)
        return rows

    def combine(self, rows):
        return self.buffer.combine(rows, self.handle)[0]


class ElasticExpanded(Elastic):
    name, expand = "deep_ep, V2, do_expand", True


class Hybrid:
    name = "deep_ep, HybridEP"

    def __init__(self, group, args):
        self.buffer = deep_ep.HybridEPBuffer(group, args.hidden, args.num_tokens, args.num_experts // group.size())
        self.n_experts = args.num_experts

    def dispatch(self, x, idx, weights):
        rows, _, _, self.handle = self.buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_of_experts=self.n_experts)
        return rows

    def combine(self, rows):
        return self.buffer.combine(rows, None, self.handle)[0]


class HybridPermuted(Hybrid):
    name = "deep_ep, HybridEP permuted"

    def dispatch(self, x, idx, weights):
        rows, *_, self.handle = self.buffer.dispatch_with_permute(hidden=x, topk_idx=idx, topk_weights=weights,
                                                                  num_of_experts=self.n_experts)
        return rows

    def combine(self, rows):
        return self.buffer.combine_with_unpermute(hidden=rows, handle=self.handle)[0]


class Gloo:
    """Dispatches by all_to_all_single of counts, of rows, and of choices with weights. Combines by the way back and index_add_."""

    def __init__(self, group, args):
        self.group, self.n, self.n_local = group, group.size(), args.num_experts // group.size()

    def exchange(self, send, in_counts, out_counts):
        recv = send.new_empty((sum(out_counts), send.size(1)))
        dist.all_to_all_single(recv, send, out_counts, in_counts, group=self.group)
        return recv

    def dispatch(self, x, idx, weights):
        self.n_tokens = x.size(0)
        self.tokens, counts = self.send_order(idx)
        got = torch.empty_like(counts)
        dist.all_to_all_single(got, counts, group=self.group)
        self.sent, self.got = counts.tolist(), got.tolist()
        beside = torch.cat([idx.to(torch.int32).view(torch.float32), weights], dim=1)
        self.exchange(beside.index_select(0, self.tokens), self.sent, self.got)
        return self.exchange(x.index_select(0, self.tokens), self.sent, self.got)

    def combine(self, rows):
        back = self.exchange(rows, self.got, self.sent)
        return back.new_zeros((self.n_tokens, rows.size(1))).index_add_(0, self.tokens, back)


class GlooByRank(Gloo):
    name = "gloo, a row a rank"

    def send_order(self, idx):
        in_rank = torch.zeros((idx.size(0), self.n), dtype=torch.bool).scatter_(1, idx // self.n_local, True)
        return in_rank.t().nonzero()[:, 1], in_rank.sum(0)


class GlooByChoice(Gloo):
    name = "gloo, a row a choice"

    def send_order(self, idx):
        expert, order = idx.view(-1).sort(stable=True)
        return order // idx.size(1), torch.bincount(expert // self.n_local, minlength=self.n)


def check(ways, x, idx, weights, n_ranks, n_local):
    """Checks that combining untouched rows gives x times the number of rows that a token was sent in."""
    for way in ways:
        out = way.combine(way.dispatch(x, idx, weights))
        if isinstance(way, (ElasticExpanded, HybridPermuted, GlooByChoice)):
            times = torch.full((x.size(0), 1), float(idx.size(1)))
        else:
            times = torch.zeros((x.size(0), n_ranks)).scatter_(1, idx // n_local, 1.0).sum(1, keepdim=True)
        worst = ((out.float() - x.float() * times).abs() / (1 + (x.float() * times).abs())).max().item()
        assert worst < 0.05, f"{way.name}: differs by {worst}"


def run(rank, n, meeting, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", world_size=n, rank=rank)
    group = dist.group.WORLD
    random = torch.Generator().manual_seed(rank)
    x = torch.randn((args.num_tokens, args.hidden), generator=random).bfloat16()
    idx = torch.rand((args.num_tokens, args.num_experts), generator=random).topk(args.num_topk, dim=1).indices
    weights = torch.rand((args.num_tokens, args.num_topk), generator=random)
    ways = [way(group, args) for way in (DeepEp, Elastic, ElasticExpanded, Hybrid, HybridPermuted, GlooByRank, GlooByChoice)]
    check(ways, x, idx, weights, n, args.num_experts // n)
    took = {way.name: ([], []) for way in ways}
    clock = time.thread_time if args.processor_time else time.perf_counter
    for _ in range(args.runs):
        for way in ways:
            marks = []
            for _ in range(args.steps + 1):  # the first warms up
                step = []
                dist.barrier()
                for call in (lambda: way.dispatch(x, idx, weights), lambda: way.combine(rows)):
                    began = clock()
                    result = call()
                    step.append(clock() - began)
                    rows = result
                    dist.barrier()
                marks.append(step)
            slowest = torch.tensor(marks[1:], dtype=torch.float64).median(0).values
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            for side, value in zip(took[way.name], slowest.tolist()):
                side.append(1e3 * value)
    if rank == 0:
        print(f"{n} processes, {args.num_tokens} tokens each, hidden {args.hidden}, bfloat16, top-{args.num_topk} of "
              f"{args.num_experts} experts; ms, median of {args.runs} alternating runs of {args.steps} steps (least, most)")
        for name, sides in took.items():
            dispatch, combine = (f"{statistics.median(s):8.1f} ({min(s):.1f}, {max(s):.1f})" for s in sides)
            print(f"{name:26} dispatch {dispatch}   combine {combine}")
    for way in ways:
        if not isinstance(way, Gloo):
            way.buffer.destroy()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("num-processes", 4), ("num-tokens", 4096), ("hidden", 2048), ("num-experts", 64), ("num-topk", 8),
                          ("runs", 5), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(run, (args.num_processes, folder + "/meeting", args), args.num_processes,
                                        start_method="fork")


if __name__ == "__main__":
    main()

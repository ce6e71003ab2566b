# SPDX-License-Identifier: Apache-2.0
"""Adaptive expert replication: its communication cost, and the tokens that its counts drop."""
import array

from . import Closed, Program, on_ranks, rows_of

PAPER = "Adaptive replication"
row = rows_of(PAPER, "perf/papers --only adaptive", "closed form")


def section_3_3():
    """GPT3-175B on 2048 GPUs, 64 experts, 2 slots per rank: gradients and weights of 3.375 GB per expert, 64 GB/s PCIe, 50 GB/s network."""
    from moeccl import solve
    static, adaptive = solve.replica_comm_time(2048, 64, 2, grad_bytes=3.375e9, weight_bytes=3.375e9, pci_bandwidth=64e9, net_bandwidth=50e9)
    yield row("Section 3.3, static, s", 0.269, static, ["within", 0.02])
    yield row("Section 3.3, adaptive, s", 0.273, adaptive, ["within", 0.02])
    yield row("Section 3.3, extra communication, %", 1.52, 100 * (adaptive / static - 1), ["within", 0.05])


def counted(n_ranks, slots, n_experts, count):
    """Returns the average bytes that a rank sends with one rank per node: gradients to the owners of their shards, and placement."""
    import moeccl
    replicas = n_ranks * slots // n_experts
    # Expert e on ranks e, e + n_experts / slots, ...: no rank holds one twice.
    placement = moeccl.Placement(n_experts, [(r * slots + s) % n_experts for r in range(n_ranks) for s in range(slots)], slots_per_rank=slots)
    assert replicas * n_experts == n_ranks * slots
    sent = [[0] * n_ranks for _ in range(2)]

    def work(comm):
        values = array.array("f", bytes(4 * slots * count))
        shards = array.array("f", bytes(4 * n_experts * moeccl.experts.shard(count, n_ranks)))
        calls = (lambda: moeccl.experts.reduce_gradients(comm, placement, values, shards),
                 lambda: moeccl.experts.place_weights(comm, placement, shards, values))
        for i, call in enumerate(calls):
            before = sum(to.bytes for to in comm.traffic())
            call()
            sent[i][comm.rank] = sum(to.bytes for to in comm.traffic()) - before

    on_ranks(n_ranks, f"node:{n_ranks}(bw=10GB/s,lat=1us)", work)
    return sum(sent[0]) / n_ranks, sum(sent[1]) / n_ranks


def appendix_a_2():
    """Counts the bytes that a rank puts on the network with 8 ranks of 2 slots and 8 experts of 1 MiB, and compares them with (sN - s) / N of an expert."""
    count, n_ranks, slots = 1 << 18, 8, 2
    grads, weights = counted(n_ranks, slots, 8, count)
    formula = (slots * n_ranks - slots) / n_ranks * 4 * count / 1e6
    yield row("Appendix A.2, weights sent by a rank, MB", formula, weights / 1e6, ["within", 0.02], "run")
    yield row("Appendix A.2, gradients sent by a rank, MB", formula, grads / 1e6, ["within", 0.02], "run")


def sources(build, quick):
    yield Closed(PAPER, section_3_3)
    if not quick:
        yield Closed(PAPER, appendix_a_2)
        yield Program(PAPER, build, ["examples/training", "--capacity", "--steps", "200"])

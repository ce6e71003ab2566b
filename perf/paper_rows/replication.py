# SPDX-License-Identifier: Apache-2.0
"""Adaptive expert replication: its communication cost, and what its counts drop."""
from . import Closed

PAPER = "Adaptive replication"
COMMAND = "perf/papers --only adaptive"


def row(item, paper, ours, rule, how="closed form", **more):
    return {"paper": PAPER, "item": item, "paper_value": paper, "ours": ours, "rule": rule, "how": how, "command": COMMAND} | more


def section_3_3():
    """GPT3-175B on 2048 GPUs, 64 experts, 2 slots a rank: gradients and weights of 3.375 GB an expert, 64 GB/s PCIe, 50 GB/s network."""
    from moeccl import solve
    static, adaptive = solve.replica_comm_time(2048, 64, 2, grad_bytes=3.375e9, weight_bytes=3.375e9, pci_bandwidth=64e9, net_bandwidth=50e9)
    yield row("Section 3.3, static, s", 0.269, static, ["within", 0.02])
    yield row("Section 3.3, adaptive, s", 0.273, adaptive, ["within", 0.02])
    yield row("Section 3.3, extra communication, %", 1.52, 100 * (adaptive / static - 1), ["within", 0.05])


def sources(_build, _quick):
    yield Closed(PAPER, section_3_3)

# SPDX-License-Identifier: Apache-2.0
"""What the five papers print and perf/papers has no row for, with the reason. tests/lint/papers_test.py checks that each table and figure of a
paper has a row, a reason here, or no results."""

# The tables and figures of each paper, in the numerals that it uses.
PRINTED = {"HierMoE": {"Table": "I II III IV", "Fig.": 13}, "NetMoE": {"Table": 5, "Fig.": 10},
           "HybridEP": {"Table": "I II III IV V VI VII", "Fig.": 17}, "MoNTA": {"Table": 8, "Fig.": 17},
           "Adaptive replication": {"Table": 4, "Fig.": 12}}

# Notation, configurations and drawings.
NO_RESULTS = {
    "HierMoE": ("Table I", "Table III", *(f"Fig. {i}" for i in range(1, 9))),
    "NetMoE": ("Table 1", "Table 2", "Table 3", "Fig. 1", "Fig. 3", "Fig. 4", "Fig. 5", "Fig. 8"),
    "HybridEP": ("Table I", "Table II", "Table III", "Fig. 1", "Fig. 3", *(f"Fig. {i}" for i in range(5, 11))),
    "MoNTA": ("Table 1", "Table 2", "Table 5", "Table 6", "Table 7", *(f"Fig. {i}" for i in range(1, 13)), "Fig. 15"),
    "Adaptive replication": ("Table 2", "Table 4", "Fig. 1", "Fig. 3", "Fig. 4", "Fig. 5", "Fig. 6")}

CLUSTER = "a whole training step on the paper's GPUs; this library has not run on several GPUs that train a model"
CURVE = "a curve without printed figures"
NOT_COMPARED = {
    "HierMoE": {
        "Fig. 9": "the fits of the paper's links, from which the rows of Table IV are computed",
        "Fig. 10 (1.18 to 1.27 over Megatron-LM, 1.10 to 1.15 over HD2-MoE)": CLUSTER + ". The goals of the training run are set after these figures, but "
        "communication takes 24 to 43 % of the paper's step, as its speed-ups imply, and about 84 % of ours",
        "Fig. 12": CURVE + "; it shows that AlltoAll's time varies less from step to step",
        "Fig. 13": "bars without printed figures; `build/perf/hiermoe_tables` prints times in the same order (docs/performance-papers.md)",
        "Section V-E, gamma from 5 to 19 (1.16 to 1.17)": "our solver takes 10, and `bench_swap --gamma` tries others; the paper sees almost no effect"},
    "NetMoE": {
        "Table 4, PuLP": "another program's time; it is no part of the method",
        "Table 4, Scatter + Computation": "times of the paper's GPUs, which hide its solver. Our solver has a deadline instead, and samples stay where it is missed",
        "Fig. 7": "bars without printed figures; `build/perf/replace_perf` compares predicted with counted bytes, which agree (docs/performance-papers.md)",
        "Fig. 9": CLUSTER,
        "Fig. 10": CURVE + ", over the steps of one training run; Table 5 has its means"},
    "HybridEP": {
        "Fig. 2": "the share of expert parallelism in a step of the paper's GPUs; it motivates the method",
        "Fig. 4": "distributions of trained weights and activations, without printed figures",
        "Fig. 11": "the model beside the paper's own cluster, without printed figures; `build/perf/hybrid_perf --what minimum` does this for our links",
        "Fig. 12": "iteration times without printed figures; its optima are the rows of Table IV",
        "Fig. 14": "loss curves without printed figures, of other models and data. The training example loses 0.56 % at 50 times with the shared expert and 3.3 % "
        "without it, the order that the paper shows (docs/training-example.md)",
        "Fig. 16": CURVE + "; `perf/studies/hybridep_paper --only 'Fig. 16'` counts the bytes of our plans",
        "Fig. 17b, plans": "no equal domains of 1000 data centres have its p of 0.2"},
    "MoNTA": {
        "Abstract, about 8 times the performance of AllToAll": "the paper prints no measurement that gives it: its own least latency is 0.253 of the baseline, about 4 times",
        "Table 3": "formulas of memory without figures; `moecclSolveLayout` evaluates them",
        "Table 4": "formulas of memory without figures; `moecclSolveLayout` evaluates them",
        "Fig. 13": "efficiencies of the paper's links; the points that its text prints are inputs of the rows of Table 8",
        "Fig. 16": "bars without printed figures",
        "Fig. 17, O2 and O3": "normalised bars without printed figures: O2 is called similar to O1, and O3 worse"},
    "Adaptive replication": {
        "Table 1, forward pass latency": "times of the paper's GPUs; in the example four threads compute experts of a few kilobytes, so that its times say nothing about tokens "
        "per expert",
        "Table 3 (25.9 to 30.5 % less time to the target loss)": CLUSTER + ", and the time to a loss contains what DeepSpeed and FlexMoE take for a step",
        "Fig. 2": "the popularity of experts in the paper's model",
        "Fig. 7": "loss curves; the iterations that the text reads from them are rows of Section 5.2, except those against FlexMoE-50 and FlexMoE-100 (12.1 and 15.6 %), "
        "as our runs of 200 steps are too short for placements that stay for 50 or 100",
        "Fig. 8": CURVE + "; its totals are rows of Section 5.2",
        "Fig. 9": "popularity beside replicas, without printed figures",
        "Fig. 10": "popularity beside replicas, without printed figures",
        "Fig. 11": CLUSTER,
        "Fig. 12": CLUSTER + "; the paper's new parts take 0.70 to 1.06 % of it"}}

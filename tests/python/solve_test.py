# SPDX-License-Identifier: Apache-2.0
"""Solvers, plans, profiles, topology and simulation: known answers of the C interface, and bad input."""
import array
import itertools
import os
import pathlib
import struct
import tempfile
import unittest
from unittest import mock

import moeccl
from moeccl import plan, pipeline, solve
from ranks import in_processes, in_threads


class Solvers(unittest.TestCase):
    def test_samples_move_to_their_experts(self):
        problem = solve.sample_problem(4, 4, 4, 2, [[0, 0, 0, 9], [0, 0, 9, 0], [0, 9, 0, 0], [9, 0, 0, 0]], beta_intra_us=1, beta_inter_us=4)
        with self.assertRaisesRegex(ValueError, "inner_beta_us has 1 numbers: give 2"):
            solve.sample_problem(4, 4, 4, 2, [[1] * 4] * 4, inner_alpha_us=[1.0, 2.0], inner_beta_us=[1.0])
        placement, answer = solve.samples(problem)
        self.assertEqual(list(placement), [3, 2, 1, 0])
        self.assertEqual((answer.keep, answer.moved, answer.inter_after), (0, 4, 0))
        self.assertGreater(answer.inter_before, 0)
        self.assertEqual(solve.evaluate_samples(problem, placement).after_us, answer.after_us)
        solver = solve.SampleSolver()
        with self.assertRaises(moeccl.Error):
            solver.fetch()
        solver.submit(problem)
        self.assertEqual(solver.fetch(), (placement, answer, "fresh"))
        solver.close()
        with self.assertRaisesRegex(ValueError, "num_gather has 3 numbers: give 4 x 4, 16"):
            solve.sample_problem(4, 4, 4, 2, [1, 2, 3])
        with self.assertRaisesRegex(TypeError, "give int32"):
            solve.sample_problem(1, 1, 1, 1, array.array("d", [1]))
        with self.assertRaisesRegex(TypeError, "unknown option colour"):
            solve.sample_problem(1, 1, 1, 1, [1], colour=2)

    def test_assignment_is_the_least(self):
        cost = [[4, 1, 3], [2, 0, 5], [3, 2, 2]]
        bins, total = solve.assignment(cost, [1, 1, 1], 3, 3)
        self.assertEqual(total, min(sum(cost[i][b] for i, b in enumerate(p)) for p in itertools.permutations(range(3))))
        self.assertEqual(total, sum(cost[i][b] for i, b in enumerate(bins)))

    def test_predictor(self):
        predictor = solve.Predictor(2, 3, 0.5)
        predictor.update([0, 0, 1, 1], [2, 2, 0, 0], 1)
        self.assertEqual(list(predictor.apply([4, 2], 1)), [2, 0, 4])

    def test_swaps_gather_what_tokens_choose_together(self):
        problem = solve.swap_problem(4, 2, [2], row_bytes=1000, inter_alpha_us=[1.0], inter_beta_us=[0.01], intra_alpha_us=[1.0],
                                     intra_beta_us=[0.01])
        topk = [[0, 2], [1, 3]] * 50
        counts = solve.swap_count(problem, topk)
        (r, c), answer = solve.swap(problem, counts)
        self.assertEqual(answer.keep, 0)
        self.assertIn({r, c}, ({0, 3}, {1, 2}))
        self.assertEqual(answer.max_load_before, 100)
        self.assertEqual(answer.max_load_after, 50)
        pairs, placement, last = solve.swap_sequence(problem, topk, 3)
        self.assertEqual((len(pairs), last.n_swaps), (2, 1))
        self.assertEqual(placement[0] // 2, placement[2] // 2)
        z = solve.swap_table(problem, counts, 0)
        self.assertEqual(list(z[(4 * 1 + 2) * 2:(4 * 1 + 2) * 2 + 2]), [50, 50])
        with self.assertRaisesRegex(ValueError, "topk has 3 numbers"):
            solve.swap_count(problem, [0, 1, 2])

    def test_replicas(self):
        self.assertEqual(list(solve.replica_counts([6, 1, 1], 4)), [2, 1, 1])
        self.assertEqual(solve.replica_drops([6.0, 1.0, 1.0], [2, 1, 1], 4, 1.0), 2.0)
        self.assertEqual(sum(solve.replica_counts([6, 1, 1], 8, 1.0)), 8)
        problem = solve.replica_problem(2, 2, 2, 2, [[10, 0], [0, 10]])
        slots, answer = solve.replicas(problem)
        self.assertEqual(sorted(slots), [0, 0, 1, 1])
        split = solve.replica_split(problem, slots)
        self.assertEqual(sum(split), 20)
        source, sends = solve.gradient_sources(slots, 2, 2, 2)
        self.assertEqual(len(source), 4)
        self.assertEqual(sum(sends), sum(source[2 * e + r] != r for e in range(2) for r in range(2)))
        self.assertEqual(answer.max_load_after, 10)
        static, adaptive = solve.replica_comm_time(4, 8, 4, grad_bytes=1e6, weight_bytes=1e6, pci_bandwidth=1e10, net_bandwidth=1e9)
        self.assertTrue(static > 0 and adaptive > 0)

    def test_domains(self):
        problem = solve.domain_problem([1e9], scale=[4], data_bytes=1e8, expert_bytes=1e5, pre_expert_s=0.01)
        domain, answer = solve.domains(problem)
        self.assertEqual((list(domain), answer.keep), ([4], 0))  # experts are small: all of them travel
        self.assertAlmostEqual(solve.domain_latency(problem, domain) * 1e6, answer.after_us, places=3)
        self.assertEqual(list(solve.domain_locate(problem, 3)), [3])
        self.assertEqual(solve.domain_link(problem, domain, 0, 0, 1), "all_gather")
        self.assertEqual(solve.domain_link(problem, [1], 0, 0, 1), "all_to_all")
        p, seconds = solve.domain_proportion(4, 1e9, 0.01, 1e8, 1e5)
        self.assertTrue(0 <= p <= 1 and seconds > 0)
        uneven = solve.domain_problem([1e9, 1e9], sizes=[2, 3, 1], data_bytes=1e6, expert_bytes=1e6)
        self.assertEqual(list(solve.domain_locate(uneven, 3)), [1, 0])
        for sizes in ([2, 3], [2, 3, 1, 4]):
            with self.assertRaisesRegex(ValueError, "sizes has"):
                solve.domain_problem([1e9, 1e9], sizes=sizes)

    def test_chunks_and_layouts(self):
        problem = solve.chunk_problem(inter=[(1e4, 0.3), (1e7, 0.9)], bytes=3e8, tensor=8, expert=4, inter_bandwidth=2.5e10, intra_bandwidth=2e11,
                                      copy_bandwidth=1e12)
        answer = solve.chunks(problem)
        best = min(answer.us)
        self.assertEqual(answer.us[answer.strategy], best)
        name = [n for n, v in solve.STRATEGIES.items() if v == answer.strategy][0]
        self.assertAlmostEqual(solve.chunk_time(problem, name, answer.n_chunks), best)
        model = {"n_gpus": 64, "gpus_per_node": 8, "gpu_bytes": 8e10, "intra_bandwidth": 2e11, "inter_bandwidth": 2.5e10, "n_layers": 32,
                 "n_heads": 32, "n_experts": 8, "top_k": 2, "hidden": 4096, "sequence": 4096, "dense_parameters": 2e9, "moe_parameters": 4e10,
                 "zero_stage": 1}
        found = solve.layouts(5, **model)
        self.assertEqual(len(found), 5)
        steps = [solve.price_layout(one, **model).step_us for one in found]
        self.assertEqual(steps, sorted(steps))
        cost = solve.price_layout(found[0], **{**model, "gpu_flops": 312e12})
        self.assertGreater(cost.step_us, found[0].comm_us)
        self.assertTrue(0 < cost.mfu < 0.5)
        self.assertEqual(solve.layouts(5, **{**model, "gpu_bytes": 1e6}), [])
        with self.assertRaisesRegex(ValueError, "n_gpus is 4294967296"):
            solve.layouts(n_gpus=2**32)


def force_and_time(comm):
    """Plans of a paced job: a forced plan runs, a profile is saved and read, and the lanes of a TensorAllToAll were busy."""
    listed = plan.algorithms("allreduce")
    plan.force(comm, "allreduce", "ring")
    x = array.array("f", [1.0] * 1000)
    comm.all_reduce(x)
    info = plan.query(comm, "allreduce", 1000)
    page = plan.explain(comm, "allreduce", 1000)
    plan.prove(comm, "allreduce", 1000)
    plan.force(comm, "allreduce", None)
    groups = pipeline.tensor_groups(comm)
    send = array.array("f", [float(groups.group * 10 + b) for b in range(groups.n_groups) for _ in range(64)])
    recv = array.array("f", bytes(4 * 64 * groups.n_groups))
    pipeline.tensor_all_to_all(comm, send, recv)
    spans = pipeline.timeline(comm, 64)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "profile.json")
        plan.save_profile(comm, path)
        plan.load_profile(comm, path)
    return ("ring" in listed, info.algorithm == "ring", info.forced == "ring", "ring" in page,
            [recv[64 * g] for g in range(groups.n_groups)] == [g * 10.0 + groups.group for g in range(groups.n_groups)],
            all(s.end_us >= s.start_us for s in spans), groups.n_ranks == 2)


class OnAGpu:
    """An array on a GPU, at an address that no CPU can read."""
    __cuda_array_interface__ = {"data": (1 << 40, False), "shape": (4,), "typestr": "<i4", "version": 3}


class Plans(unittest.TestCase):
    def test_arrays_on_a_gpu_are_refused_where_the_cpu_reads(self):
        problem = solve.swap_problem(4, 2, [2], row_bytes=1000)
        for call in (lambda: solve.swap_count(problem, OnAGpu()), lambda: moeccl.codec.Codec(1).encode(OnAGpu(), bytes(4), bytearray(64))):
            with self.assertRaisesRegex(TypeError, "is CUDA memory: give a copy on the CPU"):
                call()


    def test_plans_on_processes(self):
        self.assertEqual(in_processes(4, force_and_time, topology="node:2 gpu:2"), [(True,) * 7] * 4)

    def test_a_profile_is_saved_at_a_path_or_in_the_users_cache(self):
        [comm] = moeccl.init_all(1)
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
            plan.save_profile(comm, pathlib.Path(folder, "mine.json"))
            plan.save_profile(comm)
            self.assertEqual(sorted(os.listdir(folder)), ["mine.json", "moeccl"])
            self.assertEqual(len(os.listdir(os.path.join(folder, "moeccl"))), 1)

    def test_profiles_that_cannot_be_had(self):
        def work(comm):
            with self.assertRaisesRegex(moeccl.Error, "give at least"):
                plan.calibrate(comm, 1, 4096)
            with self.assertRaises(moeccl.Error):
                plan.load_profile(comm, "/nowhere/profile.json")

        in_threads(2, work)

    def test_names_are_checked(self):
        with self.assertRaisesRegex(ValueError, "op is 'all_reduce': there are allreduce, reduce"):
            plan.algorithms("all_reduce")
        [comm] = moeccl.init_all(1)
        with self.assertRaisesRegex(moeccl.Error, "moecclInvalidArgument"):
            plan.force(comm, "allreduce", "fastest")
        comm.close()

    def test_topology_and_simulation(self):
        self.assertIn("node:2", plan.describe_topology("node:2 gpu:8", "levels"))
        self.assertIn("{", plan.describe_topology(format="json"))
        with self.assertRaisesRegex(ValueError, "format is 'xml'"):
            plan.describe_topology(format="xml")
        page = plan.simulate("node:4(bw=50GB/s,lat=5us) gpu:4", tokens_per_rank=64, n_experts=16, top_k=4)
        self.assertIn("SIMULATED", page)
        self.assertIn("hier", page)
        self.assertIn("{", plan.simulate("node:2 gpu:2", "allreduce", count=1000, json=1)[:2])
        with self.assertRaisesRegex(moeccl.Error, "top"):
            plan.simulate("node:0")
        with self.assertRaisesRegex(TypeError, "unknown option colour"):
            plan.simulate("node:2", colour=1)
        self.assertIn("SIMULATED", plan.simulate("node:2 gpu:2", "expert_gather", count=1000, n_experts=8, domain=[2, 1]))

    def test_a_trace_has_its_own_experts(self):
        with tempfile.NamedTemporaryFile() as trace:  # 8 tokens choose two of 4 experts
            trace.write(b"MOETRACE" + struct.pack("<6I", 1, 1, 1, 8, 2, 4) + struct.pack("<16i", *[0, 1, 2, 3] * 4))
            trace.flush()
            given = {"topology": "node:2 gpu:2", "routing": "trace:" + trace.name}
            for fits in ({}, {"n_experts": 4, "top_k": 2}, {"expert_rank": [3, 2, 1, 0]}):
                self.assertIn("top-2 of 4 experts", plan.simulate(**given, **fits))
            for name, wrong, said in (("n_experts", 16, "n_experts is 16, and the trace has 4"), ("top_k", 3, "top_k is 3, and the trace has 2"),
                                      ("expert_rank", [0, 1], "n_experts is 2, and the trace has 4")):
                with self.assertRaisesRegex(moeccl.Error, said):
                    plan.simulate(**given, **{name: wrong})

    def test_status(self):
        with moeccl.Comm(1, moeccl.unique_id(), 0, name="alone") as comm:
            comm.all_reduce(bytearray(8))
            mine, = [c for c in plan.status()["communicators"] if c["name"] == "alone"]
            self.assertEqual((mine["rank"], mine["n_ranks"], mine["state"], mine["waits"]), (0, 1, "running", []))
            self.assertEqual([(o["op"], o["count"], o["state"]) for o in mine["operations"]], [("allreduce", 8, "done")])
        self.assertNotIn("alone", [c["name"] for c in plan.status()["communicators"]])
        with self.assertRaisesRegex(moeccl.Error, "no such process"):
            plan.status(4194303)

    def test_doctor(self):
        self.assertIn("rank", plan.doctor(2))


if __name__ == "__main__":
    unittest.main()

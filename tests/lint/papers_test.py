# SPDX-License-Identifier: Apache-2.0
"""The rules of perf/papers, what it refuses (rows that differ without a reason), and how new rows replace old ones."""
import json
import os
import re
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "../.."))
from perf.paper_rows import Program, hiermoe, hybridep  # noqa: E402
from perf.paper_rows.not_compared import NO_RESULTS, NOT_COMPARED, PRINTED  # noqa: E402
from perf.paper_rows.page import DOCS, counted, holds, judged, merged, missing, page, picture, text  # noqa: E402

ROW = {"paper": "P", "item": "Table 1", "paper_value": 2.0, "ours": 2.1, "rule": ["within", 0.1], "how": "run", "command": "x"}


class Papers(unittest.TestCase):
    def test_rules(self):
        self.assertTrue(holds(["within", 0.1], 2.0, 2.19))
        self.assertFalse(holds(["within", 0.1], 2.0, 2.21))
        self.assertTrue(holds(["within", 0.1], -2.0, -2.1))
        self.assertFalse(holds(["points", 5], 40, 45.5))
        self.assertTrue(holds(["at least", 1.2], 1.5, 1.2))
        self.assertFalse(holds(["at most", 1.2], 1.5, 1.3))
        self.assertFalse(holds(["equal"], [1, 2], [1, 3]))
        self.assertTrue(holds(["in", 1.18, 2.57], "1.18 to 2.57", 1.18))
        self.assertFalse(holds(["in", 1.18, 2.57], "1.18 to 2.57", 1.0))
        self.assertFalse(holds(["in", 1.18, 2.57], "1.18 to 2.57", 3.9))
        with self.assertRaises(ValueError):
            holds(["nearly"], 1, 1)

    def test_a_row_that_differs_says_why(self):
        self.assertEqual(judged(ROW)["verdict"], "holds")
        with self.assertRaisesRegex(ValueError, "says not why"):
            judged(ROW | {"ours": 3.0})
        self.assertEqual(judged(ROW | {"ours": 3.0, "why": "another cluster"})["verdict"], "differs")
        with self.assertRaisesRegex(ValueError, "lacks rule"):
            judged({k: v for k, v in ROW.items() if k != "rule"})

    def test_one_sided_rules_are_counted_apart(self):
        rows = [judged(ROW), judged(ROW | {"ours": 3.0, "why": "another cluster"}), judged(ROW | {"rule": ["at least", 1.5], "ours": 9.0})]
        self.assertEqual(counted(rows), "2 of 3 rows hold their rule: 1 of 2 agree with the paper within a tolerance, and 1 of 1 pass a "
                                        "one-sided rule")

    def test_fitted_rows_and_goals_are_counted_apart(self):
        rows = [judged(ROW), judged(ROW | {"how": "fitted"}), judged(ROW | {"paper_value": None, "rule": ["at least", 3], "why": "too slow"})]
        self.assertEqual(counted(rows), "1 of 1 rows hold their rule: 1 of 1 agree with the paper within a tolerance, and 0 of 0 pass a one-sided "
                                        "rule (counted apart: 1 of 1 fitted rows hold theirs, and 0 of 1 goals of this project are met)")

    def test_a_goal_is_not_in_the_table_of_the_papers_figures(self):
        goal = judged(ROW | {"item": "as fast as ours", "paper_value": None, "rule": ["at least", 2]})
        shown = page([judged(ROW), goal], "2026-01-01")
        self.assertIn("| as fast as ours | at least 2 | 2.1 | met | run |", shown)
        self.assertLess(shown.index("| Table 1 |"), shown.index("Goals of this project"))
        self.assertLess(shown.index("Goals of this project"), shown.index("| as fast as ours |"))

    def test_every_table_and_figure_has_a_row_or_a_reason_or_no_results(self):
        with open(os.path.join(DOCS, "papers.json"), encoding="utf-8") as f:
            rows = json.load(f)["rows"]
        for paper, parts in PRINTED.items():
            items = [row["item"] for row in rows if row["paper"] == paper] + list(NOT_COMPARED[paper])
            for kind, numbers in parts.items():
                for number in numbers.split() if isinstance(numbers, str) else range(1, numbers + 1):
                    name = f"{kind} {number}"
                    found = any(re.match(re.escape(name) + r"(?![0-9IVX])", item) for item in items)
                    self.assertNotEqual(found, name in NO_RESULTS[paper], f"{paper}, {name}: give it a row in perf/paper_rows or a place in not_compared.py")

    def test_a_one_sided_threshold_is_a_part_of_the_rows_own_figure(self):
        with open(os.path.join(DOCS, "papers.json"), encoding="utf-8") as f:
            rows = [row for row in json.load(f)["rows"] if isinstance(row["paper_value"], (int, float))]
        for row in rows:
            if row["rule"][0] == "at least":
                self.assertGreaterEqual(row["rule"][1], 0.849 * row["paper_value"], row["item"])
            if row["rule"][0] == "at most":
                self.assertLessEqual(row["rule"][1], 1.15 * row["paper_value"], row["item"])

    def test_the_gain_of_a_swap_is_judged_and_not_the_ratio(self):
        given = ROW | {"item": "Table IV, K=8 E=128 G=8, HierMoE over HD-MoE", "paper_value": 1.21, "ours": 1.07}
        self.assertEqual(judged(given | hiermoe.judge(given))["verdict"], "differs")

    def test_a_cells_own_bound_is_its_reason(self):
        given = ROW | {"item": "Table IV, K=8 E=128 G=16, HD-MoE over HD2-MoE", "bound": 1.31}
        self.assertIn("at most about 1.31 ", hiermoe.judge(given)["why"])

    def test_a_compressed_return_is_no_figure_of_the_paper(self):
        judged_as = hybridep.judge({"item": "Table VI, Cluster-M, 24 & 8 MB, compressed return", "paper_value": 1.34, "ours": 8.1})
        self.assertIsNone(judged_as["paper_value"])
        self.assertEqual(judged_as["rule"], ["at least", 1.25])

    def test_the_page_is_that_of_the_record(self):
        with open(os.path.join(DOCS, "papers.json"), encoding="utf-8") as f:
            record = json.load(f)
        with open(os.path.join(DOCS, "papers.md"), encoding="utf-8") as f:
            self.assertEqual(f.read(), page(record["rows"], record["date"]), "run perf/papers --page")

    def test_only_the_model_with_groups_has_a_note_about_them(self):
        for item, noted in (("Fig. 11, DeepSeek-V3 K=8 E=256 G=32, HD-MoE", True), ("Table IV, K=8 E=128 G=32, HD-MoE", False)):
            self.assertEqual("why" in hiermoe.judge({"item": item}), noted, item)

    def test_new_rows_take_the_place_of_old_ones(self):
        old = {("P", "Table 1"): ROW, ("P", "Table 2"): ROW | {"item": "Table 2"}}
        rows = merged(old, [ROW | {"ours": 2.0}, ROW | {"item": "Table 3"}])
        self.assertEqual([(r["item"], r["ours"]) for r in rows], [("Table 1", 2.0), ("Table 2", 2.1), ("Table 3", 2.1)])

    def test_a_row_that_held_and_is_gone_is_named(self):
        known = {("P", item): ROW | {"item": item, "verdict": verdict} for item, verdict in (("1", "holds"), ("2", "holds"), ("3", "differs"))}
        self.assertEqual(missing(known, [ROW | {"item": "1"}], {"P"}), ["P, 2: held, and was not computed"])
        self.assertEqual(missing(known, [], {"Q"}), [])

    def test_a_program_that_hangs_is_one_problem(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "hangs")
            with open(path, "w", encoding="utf-8") as f:
                f.write("#!/bin/sh\nexec sleep 60\n")
            os.chmod(path, 0o755)
            with self.assertRaisesRegex(RuntimeError, "not over after 0.2 s"):
                list(Program("P", folder, ["hangs"], limit=0.2).rows())

    def test_the_picture_has_a_point_for_each_ratio(self):
        drawn = picture([judged(ROW), judged(ROW | {"ours": -1.0, "why": "a sign"}), judged(ROW | {"rule": ["equal"], "ours": 2.0})])
        self.assertEqual(drawn.count("<circle"), 2)
        self.assertEqual(text(1234.5), "1234")

    def test_a_ratio_beyond_the_edge_is_an_arrow(self):
        drawn = picture([judged(ROW), judged(ROW | {"rule": ["at most", 2.0], "ours": 0.001})])
        self.assertEqual((drawn.count("<circle"), drawn.count("<path")), (1, 1))
        self.assertIn("An arrow", drawn)

    def test_a_long_label_stays_in_the_frame(self):
        drawn = picture([judged(ROW | {"item": "Fig. 15, decoding in the experts' computation, experts of 32 MiB, overhead saved"}), judged(ROW)])
        labels = re.findall(r'y="(\d+)" font-size="11" text-anchor="end"[^>]*>([^<]+)<', drawn)
        self.assertEqual(len(labels), 3)
        self.assertLess(max(len(words) for _, words in labels), 60)
        self.assertEqual(len({y for y, _ in labels}), 3)


if __name__ == "__main__":
    unittest.main()

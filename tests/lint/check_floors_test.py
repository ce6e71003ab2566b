# SPDX-License-Identifier: Apache-2.0
"""The floor check finds what it should: each test breaks one rule in a small tree."""
import os
import subprocess
import sys
import tempfile
import unittest

CHECK = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../tools/check-floors")

TREE = {
    "include/moeccl/a.h": "",
    "src/base/log.h": "#include <moeccl/a.h>\n",
    "src/base/clock.h": "",
    "src/driver/socket.h": "#include <sys/socket.h>\n",
    "kernels/table.h": "",
    "kernels/host/element.h": '#include "kernels/table.h"\n',
    "src/plan/plan.h": '#include "src/base/log.h"\n#include "kernels/table.h"\n',
    "src/algo/ring.h": '#include "src/plan/plan.h"\n',
    "src/solve/swap.h": "",
    "transport/transport.h": "",
    "transport/shm/link.h": '#include "transport/transport.h"\n',
    "transport/paced/link.h": "",
    "src/exec/host.h": '#include "transport/shm/link.h"\n',
    "perf/common.h": "#include <moeccl/a.h>\n",
}


def findings(extra, only=("includes", "length")):
    with tempfile.TemporaryDirectory() as root:
        for name, text in {**TREE, **extra}.items():
            path = os.path.join(root, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as f:
                f.write(text)
        command = [sys.executable, CHECK, "--root", root] + [word for name in only for word in ("--only", name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout


class CheckFloors(unittest.TestCase):
    def broken(self, name, text, reason):
        code, out = findings({name: text})
        self.assertEqual(code, 1, f"{name} passed")
        self.assertEqual(len(out.splitlines()), 1, out)
        self.assertIn(name, out)
        self.assertIn(reason, out)

    def fine(self, name, text):
        code, out = findings({name: text})
        self.assertEqual((code, out), (0, ""))

    def test_a_good_tree_passes(self):
        self.assertEqual(findings({}), (0, ""))

    def test_licence(self):
        licence = "SPDX-License-Identifier: Apache-2.0"
        good = {name: f"// {licence}\n{text}" for name, text in TREE.items()}
        good |= {"a.py": f"# {licence}\n", "tools/run": f"#!/bin/sh\n# {licence}\ntrue\n", "meson.build": f"# {licence}\n",
                 "docs/page.md": "# Page\n", "tests/abi/v0.1/moeccl/a.h": "int x;\n"}
        self.assertEqual(findings(good, ["licence"]), (0, ""))
        for name, text in {"src/base/new.cc": "int x;\n", "new.py": "", "tools/new": "#!/bin/sh\ntrue\n", "new/meson.build": "x = 1\n",
                           "tests/abi/new.h": f"int x;\n\n// {licence}\n"}.items():
            code, out = findings({**good, name: text}, ["licence"])
            self.assertEqual((code, len(out.splitlines())), (1, 1), out)
            self.assertIn(name, out)

    def test_the_scale_of_repetitions_is_no_switch(self):
        good = {"tests/fault/a_test.cc": "for (int i = 0; i < scaled(30); ++i) go();\nif (test_scale() >= 4) counts.push_back(16);\n",
                "tests/support/b.cc": "int scaled(int n) { return n * test_scale(); }\n"}
        self.assertEqual(findings(good, ["scale"]), (0, ""))
        for bad in ("if (test_scale() < 1) GTEST_SKIP();", "if (testing::test_scale() < 1) return;", "if (test_scale() >= 1) {"):
            code, out = findings({**good, "tests/unit/c_test.cc": bad + "\n"}, ["scale"])
            self.assertEqual((code, len(out.splitlines())), (1, 1), out)
            self.assertIn("tests/unit/c_test.cc:1", out)

    def test_upstairs(self):
        self.broken("src/base/x.cc", '#include "src/exec/host.h"\n', "downstairs")

    def test_same_floor(self):
        self.broken("src/algo/x.cc", '#include "src/solve/swap.h"\n', "downstairs")
        self.broken("kernels/x.cc", '#include "src/driver/socket.h"\n', "downstairs")

    def test_transports_never_include_each_other(self):
        self.broken("transport/shm/x.cc", '#include "transport/paced/link.h"\n', "each other")

    def test_plan_sees_little(self):
        self.broken("src/plan/x.cc", '#include "src/driver/socket.h"\n', "src/plan sees")
        self.broken("src/plan/x.cc", '#include "kernels/host/element.h"\n', "src/plan sees")

    def test_thinking_is_pure(self):
        self.broken("src/algo/x.cc", '#include "src/base/clock.h"\n', "pure")

    def test_doors(self):
        self.broken("src/exec/x.cc", "#include <sys/socket.h>\n", "door")
        self.broken("topology/x.cc", "#include <hwloc.h>\n", "door")
        self.broken("src/comm/x.cc", "#include <cuda_runtime.h>\n", "door")
        self.fine("kernels/cuda/x.cu", "#include <cuda_runtime.h>\n")

    def test_guests(self):
        self.broken("perf/all_reduce.cc", '#include "src/base/log.h"\n', "public headers")
        self.broken("shim/x.cc", '#include "perf/common.h"\n', "public headers")
        self.fine("perf/bench_kernels.cc", '#include "kernels/table.h"\n#include "perf/common.h"\n')
        self.fine("tests/unit/x.cc", '#include "src/exec/host.h"\n#include <sys/socket.h>\n')

    def test_missing_file(self):
        self.broken("src/exec/x.cc", '#include "src/exec/nothing.h"\n', "no such file")

    def test_length(self):
        self.broken("src/exec/x.cc", "\n" * 531, "531 lines")
        self.fine("src/exec/x.cc", "\n" * 530)


if __name__ == "__main__":
    unittest.main()

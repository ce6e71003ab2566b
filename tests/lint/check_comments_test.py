# SPDX-License-Identifier: Apache-2.0
"""The comment check finds what it should, and nothing else."""
import os
import subprocess
import sys
import tempfile
import unittest

CHECK = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../tools/check-comments")


def findings(extra):
    tree = {"src/plan/op.h": "int parse_op();\n", "docs/plans.md": "", "src/exec/a.cc": "// all is well\n", **extra}
    with tempfile.TemporaryDirectory() as root:
        for name, text in tree.items():
            os.makedirs(os.path.dirname(os.path.join(root, name)), exist_ok=True)
            with open(os.path.join(root, name), "w", encoding="utf-8") as file:
                file.write(text)
        done = subprocess.run([sys.executable, CHECK, "--root", root], capture_output=True, text=True, check=False)
        return done.stdout.splitlines()


class Comments(unittest.TestCase):
    def test_paths_must_exist(self):
        self.assertEqual(findings({"src/exec/b.cc": "int x;\n// see plan/op.h, op.h, docs/plans.md and <fmt/core.h>\n"}), [])
        self.assertEqual(findings({"src/exec/b.cc": "int x;  // see comm/op.h\n"}), ["src/exec/b.cc:1: no file comm/op.h"])
        self.assertEqual(findings({"src/exec/b.h": "/* one\n * gone.cc */\n"}), ["src/exec/b.h:2: no file gone.cc"])

    def test_names_must_exist_outside_of_comments(self):
        self.assertEqual(findings({"src/exec/b.cc": "// parse_op() and plan::parse_op()\n"}), [])
        self.assertEqual(findings({"src/exec/b.cc": "\n// see correct_profile()\n", "src/exec/c.cc": "// correct_profile\n"}),
                         ["src/exec/b.cc:2: nothing is called correct_profile()"])

    def test_style(self):
        self.assertEqual(findings({"src/exec/b.cc": "// One of them. Offsets of rows, the whole of it.\n"}), [])
        self.assertEqual(findings({"src/exec/b.cc": "// Of the machine.\n// It ends. Of two, one.\n/* Rows.\n * Of one.\n */\n"}),
                         [f'src/exec/b.cc:{n}: style: "Of" in a comment' for n in (1, 2, 4)])
        self.assertEqual(findings({"src/exec/b.cc": "int x;  // nobody waits, whoever it is\n"}),
                         [f'src/exec/b.cc:1: style: "{w}" in a comment' for w in ("nobody", "whoever")])

    def test_strings_are_no_comments(self):
        self.assertEqual(findings({"src/exec/b.cc": 'const char* x = "// gone.cc gone()";\n'}), [])


if __name__ == "__main__":
    unittest.main()

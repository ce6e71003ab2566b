# SPDX-License-Identifier: Apache-2.0
"""tools/check-docs finds what it should: each test breaks one rule in a small tree."""
import os
import subprocess
import sys
import tempfile
import unittest

CHECK = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../tools/check-docs")

TREE = {
    "src/base/env.h": "struct Env {\n  // MOECCL_ONE_MS: how long.\n  // Longer than a line.\n  int64_t one_ms = 600'000;\n"
                      "  // MOECCL_TWO, else NCCL_TWO: a name.\n  std::string two;\n};\n",
    "src/base/env.cc": 'constexpr Variable kVariables[] = {\n    {"MOECCL_ONE_MS", "milliseconds, 1 to 9", integer},\n'
                       '    {"MOECCL_TWO",\n     "a word", words},\n};\n'
                       "// Read elsewhere: rows.\n//   MOECCL_SHIM_X | the shims | 0 or 1 | 0 | With 1 it\n//     is quiet.\n\n"
                       'constexpr std::string_view kElsewhere[] = {"MOECCL_SHIM_X"};\n',
    "shim/x.cc": 'const char* x = std::getenv("MOECCL_SHIM_X");\n',
    "docs/page.md": "# Page\n\nThis page is about nothing. See [the other](decisions.md).\n",
    "docs/decisions.md": "# Decisions\n\nWhy.\n\n<!-- list: written by tools/check-docs --fix -->\n<!-- end of list -->\n",
    "docs/decisions/001-so.md": "# 001. It is so\n\n2026-11-23 · House\n\nBecause.\n",
}


def run(extra):
    """Returns the run before --fix, the run after it, and the pages that --fix wrote."""
    with tempfile.TemporaryDirectory() as root:
        for name, text in {**TREE, **extra}.items():
            path = os.path.join(root, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        command = [sys.executable, CHECK, "--root", root]
        stale = subprocess.run(command, capture_output=True, text=True, check=False)
        subprocess.run([*command, "--fix"], capture_output=True, text=True, check=False)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        pages = {}
        for name in ("docs/variables.md", "docs/decisions.md"):
            with open(os.path.join(root, name), encoding="utf-8") as file:
                pages[name] = file.read()
        return stale, done, pages


class CheckDocs(unittest.TestCase):
    def finds(self, extra, words):
        _, done, _ = run(extra)
        self.assertEqual(done.returncode, 1, f"nothing was found in {extra}")
        self.assertIn(words, done.stdout + done.stderr)

    def test_a_good_tree_passes_once_its_pages_are_written(self):
        stale, done, pages = run({})
        self.assertIn("run tools/check-docs --fix", stale.stdout)
        self.assertEqual((done.returncode, done.stdout), (0, ""))
        for words in ("### MOECCL_ONE_MS\n\nHow long. Longer than a line.\n\n*Accepts* milliseconds, 1 to 9. *Default:* `600000`.",
                      "`NCCL_TWO` counts where this one is not set.", "## The shims\n\n### MOECCL_SHIM_X\n\nWith 1 it is quiet."):
            self.assertIn(words, pages["docs/variables.md"])
        self.assertIn("## House\n\n- [001. It is so](decisions/001-so.md)", pages["docs/decisions.md"])

    def test_every_variable_has_a_description_and_a_row(self):
        self.finds({"src/base/env.cc": TREE["src/base/env.cc"].replace("};", '    {"MOECCL_NEW", "0 or 1", flag},\n};')}, "MOECCL_NEW")
        self.finds({"src/base/env.h": TREE["src/base/env.h"].replace("};", "  // MOECCL_NEW: new.\n  bool n = false;\n};")}, "MOECCL_NEW")
        self.finds({"shim/y.cc": 'getenv("MOECCL_SHIM_Y");\n'}, "MOECCL_SHIM_Y is read but not described")
        self.finds({"src/base/env.cc": TREE["src/base/env.cc"].replace('{"MOECCL_SHIM_X"}', '{"MOECCL_SHIM_X", "MOECCL_SHIM_Z"}')},
                   "MOECCL_SHIM_Z: src/base/env.cc has it in kElsewhere or")

    def test_what_init_compares_is_the_same_on_all_ranks(self):
        tree = {"src/world/introduction.cc": 'error(moecclMismatch, "rank 0 and rank {} disagree on MOECCL_TWO ({} and {})");\n',
                "src/world/config.cc": 'if (one_ms != o.one_ms) return format("one_ms ({} and {})", one_ms, o.one_ms);\n',
                "src/base/env.h": TREE["src/base/env.h"].replace("a line.", "a line. The same on all ranks.").replace("a name.", "the same on all ranks."),
                "docs/mismatches.md": "# Mismatches\n\nWhat is compared.\n\n| init | MOECCL_TWO, one_ms | every rank |\n"}
        self.assertEqual(run(tree)[1].stdout, "")
        self.finds({**tree, "src/base/env.h": TREE["src/base/env.h"]}, "MOECCL_ONE_MS: init compares it")
        self.finds({**tree, "src/base/env.h": TREE["src/base/env.h"]}, "MOECCL_TWO: init compares it")
        self.finds({**tree, "docs/mismatches.md": tree["docs/mismatches.md"].replace(", one_ms", "")}, "the row of init lacks one_ms")

    def test_pages_show_examples_as_they_are(self):
        page = {"docs/start.md": "# Start\n\nGo.\n\n<!-- from examples/a.c -->\n```c\nold\n```\n", "examples/a.c": "int a;\n"}
        stale, done, _ = run(page)
        self.assertIn("docs/start.md is not what its sources say", stale.stdout)
        self.assertEqual(done.stdout, "")
        self.finds({"docs/start.md": page["docs/start.md"]}, "no file examples/a.c")

    def test_links_lead_somewhere(self):
        self.finds({"docs/page.md": "# Page\n\nSee [that](gone.md).\n"}, "no file gone.md")
        _, done, _ = run({"docs/page.md": "# Page\n\nSee `[x](gone.md)`.\n\n```\n[y](gone.md)\n```\n"})
        self.assertEqual(done.stdout, "")

    def test_pages_say_what_they_are_for(self):
        self.finds({"docs/page.md": "# Page\n\n| a | b |\n|-|-|\n"}, "what the page is for")
        self.finds({"docs/page.md": "Page\n"}, "what the page is for")

    def test_decisions_have_numbers_and_dates(self):
        self.finds({"docs/decisions/002-no.md": "# 002. No date\n\nBecause.\n"}, "002-no.md: begins otherwise")
        self.finds({"docs/decisions/001-again.md": "# 001. Again\n\n2026-11-23 · House\n\nBecause.\n"}, "has the number of")
        tried = {"docs/decisions/002-tried.md": "# 002. Tried\n\n2026-11-23 · House\n\nBy `perf/one --x`, `perf/two` and `build/perf/two`.\n", "perf/two.cc": ""}
        self.finds(tried, "002-tried.md: no program perf/one")
        self.assertEqual(run({**tried, "perf/one": ""})[1].stdout, "")
        self.finds({"docs/decisions/003-x.md": "# 002. X\n\n2026-11-23 · House\n\nBecause.\n"}, "its title says 002")


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""tools/joined.py puts each source into one file, and keeps apart what cannot be compiled together."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

TOOLS = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../tools")
sys.path.insert(0, TOOLS)
import joined  # noqa: E402, the folder above has it

OUTSIDE = "namespace moeccl {\nint %s() { return 1; }\n}  // namespace moeccl\n"


def inside(text):
    return f"namespace moeccl {{\nnamespace {{\n{text}\n}}  // namespace\n}}  // namespace moeccl\n"


class Joined(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name).resolve()

    def write(self, **texts):
        """Returns the paths of NAME.cc with these texts."""
        paths = [self.root / f"{name}.cc" for name in texts]
        for path, text in zip(paths, texts.values()):
            path.write_text(text)
        return paths

    def groups(self, *texts):
        """Returns the names of the sources in each file; the sources are a, b, c, ..."""
        paths = self.write(**{chr(ord("a") + k): text for k, text in enumerate(texts)})
        return ["".join(path.stem for path in group) for group in joined.groups_of(paths)]

    def join(self, paths, name="some"):
        """Returns the files that the script writes, in the order in which it prints them."""
        done = subprocess.run([sys.executable, os.path.join(TOOLS, "joined.py"), self.root / "out", name, *paths], capture_output=True,
                              text=True, check=True)
        return [pathlib.Path(line) for line in done.stdout.splitlines()]

    def test_sources_without_a_common_name_share_a_file(self):
        self.assertEqual(self.groups(inside("int one() { return 1; }"), inside("int two() { return 2; }"), OUTSIDE % "three"), ["abc"])

    def test_names_that_clash_are_in_different_files(self):
        for first, second in [("int same() { return 1; }", "int same(int x) {\n  return x;\n}"),
                              ("constexpr int kSame = 1;", "const char* const kOther = \"\", *const kSame = kOther;"),
                              ("struct Same {\n  int x;\n};", "enum class Same { kA };"),
                              ("using Same = int;", "class Same {};"),
                              ("enum { kA, kSame };", "int kSame = 1;"),
                              ("std::atomic<int> same{0};", "thread_local bool same = false;"),
                              ("int same[4];", "template <class T>\nT same(T x) {\n  return x;\n}"),
                              ("std::ostream& operator<<(std::ostream& o, int);", "std::ostream& operator<<(std::ostream& o, char);")]:
            with self.subTest(first=first):
                self.assertEqual(self.groups(inside(first), inside(second), inside("int third;")), ["ac", "b"])
        self.assertEqual(self.groups("static int same() { return 1; }\n", inside("int same;")), ["a", "b"])
        self.assertEqual(self.groups("#define SAME 1\n", "#define SAME 2\n", "#define OTHER 2\n"), ["ac", "b"])

    def test_names_that_only_look_alike_do_not_clash(self):
        for text in ["int %s;  // same", "const char* %s = \"int same;\";", "int %s() {\n  int same = 1;\n  return same;\n}",
                     "constexpr Mode %s = Mode::kSame;"]:
            with self.subTest(text=text):
                self.assertEqual(self.groups(inside(text % "one"), inside(text % "two"), inside("int same;\nconstexpr int kSame = 1;")),
                                 ["abc"])

    def test_a_name_that_hides_one_of_a_header_is_kept_apart(self):
        self.addCleanup(setattr, joined, "ROOT", joined.ROOT)
        joined.ROOT = self.root
        (self.root / "tests").mkdir()
        (self.root / "tests/one.h").write_text('#pragma once\n#include "tests/two.h"\n')
        (self.root / "tests/two.h").write_text("namespace moeccl::testing {\n\ninline int shared() { return 1; }\n\n}  // namespace moeccl::testing\n")
        header = '#include "tests/one.h"\n'
        self.assertEqual(self.groups(header + inside("int one;"), inside("int shared(int x) { return x; }"), header + inside("int two;")),
                         ["ac", "b"])
        self.assertEqual(self.groups(inside("int shared(int x) { return x; }"), header + inside("int one;")), ["a", "b"])

    def test_a_source_with_a_header_of_linux_is_alone(self):
        system = "#include <linux/errqueue.h>\n"
        self.assertEqual(self.groups(OUTSIDE % "one", system + OUTSIDE % "two", system + OUTSIDE % "three", OUTSIDE % "four"),
                         ["ad", "b", "c"])

    def test_a_file_has_a_limit(self):
        third = "// " + "x" * (joined.MOST_BYTES // 3) + "\n"
        self.assertEqual(self.groups(third, third, third, "int x;\n"), ["abd", "c"])
        self.assertEqual(self.groups(3 * third, "int x;\n"), ["a", "b"])

    def test_every_source_is_included_once_by_its_path(self):
        texts = {f"source{k}": inside(f"int name{k % 4};") for k in range(12)}
        paths = self.write(**texts)
        files = self.join(paths)
        self.assertEqual(files, [self.root / "out" / f"some_{k}.cc" for k in range(3)])
        included = [line for file in files for line in file.read_text().splitlines()]
        self.assertEqual(sorted(included), sorted(f'#include "{path}"' for path in paths))

    def test_a_file_that_stays_the_same_is_not_written_again(self):
        paths = self.write(one=inside("int same;"), two=inside("int same;"))
        files = self.join(paths)
        for file in files:
            os.utime(file, (1, 1))
        self.assertEqual(self.join(paths + self.write(three=inside("int third;"))), files)
        self.assertEqual([file.stat().st_mtime == 1 for file in files], [False, True])

    def test_the_library_as_it_is(self):
        """Each source of the library is in one group, and no name that a group's sources define is there twice."""
        sources = sorted(pathlib.Path(TOOLS).resolve().parent.glob("src/*/*.cc"))
        groups = joined.groups_of(sources)
        self.assertEqual(sorted(path for group in groups for path in group), sources)
        self.assertLess(len(groups), len(sources) / 4)
        for group in groups:
            found = {}
            for path in group:
                for name in re.findall(r"^(?:struct|class) (\w+) [:{]", "".join(joined.unnamed_parts(path.read_text())), flags=re.M):
                    self.assertNotIn(name, found, f"{path} and {found.get(name)}")
                    found[name] = path


if __name__ == "__main__":
    unittest.main()

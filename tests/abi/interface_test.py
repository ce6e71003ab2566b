# SPDX-License-Identifier: Apache-2.0
"""The C interface is the one that programs were compiled against (interface.py), and a change that they would notice is found."""
import os
import shutil
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, HERE)
import interface  # noqa: E402

INCLUDE = os.path.join(interface.ROOT, "include")
MAP = os.path.join(interface.ROOT, "src/api/moeccl.map")


class Interface(unittest.TestCase):
    def changed(self, header, old, new):
        """Returns what is found after one header has changed."""
        with tempfile.TemporaryDirectory() as place:
            shutil.copytree(INCLUDE, place, dirs_exist_ok=True)
            path = os.path.join(place, "moeccl", header)
            with open(path, encoding="utf-8") as text:
                before = text.read()
            self.assertEqual(before.count(old), 1, f"{header} has not one '{old}': this test needs another example")
            with open(path, "w", encoding="utf-8") as text:
                text.write(before.replace(old, new))
            return "\n".join(interface.differences(place))

    def test_present_interface_is_the_approved_one(self):
        self.assertEqual(list(interface.differences(INCLUDE, os.environ["LIBMOECCL"])), [],
                         "if no program has this yet: python3 tests/abi/interface.py --write")

    def test_debian_lists_every_symbol_and_no_other(self):
        with tempfile.TemporaryDirectory() as place, open(interface.SYMBOLS, encoding="utf-8") as listed:
            names = {line.split()[0] for line in listed if line.startswith(" ")}
            built = interface.symbols(interface.model(INCLUDE, place))
        self.assertEqual(names, {f"{n}@{v}" for n, v in built.items()} | {f"{v}@{v}" for v in built.values()},
                         "python3 tests/abi/interface.py --write adds new ones")

    def test_removed_function_is_found(self):
        found = self.changed("types.h", "MOECCL_API size_t moecclTypeSize(moecclDataType_t type);", "")
        self.assertIn("moecclTypeSize", found)

    def test_other_argument_is_found(self):
        self.assertIn("moecclTypeSize", self.changed("types.h", "moecclTypeSize(moecclDataType_t type)", "moecclTypeSize(uint64_t type)"))

    def test_other_number_is_found(self):
        self.assertIn("moecclSystemError", self.changed("types.h", "moecclSystemError = 1,", "moecclSystemError = 77,"))

    def test_field_between_others_is_found(self):
        self.assertIn("between", self.changed("comm.h", "  int32_t timeout_ms;", "  uint64_t between;\n  int32_t timeout_ms;"))

    def test_growth_is_no_difference(self):
        self.assertEqual(self.changed("comm.h", "} moecclConfig_t;", "  uint64_t grown;\n} moecclConfig_t;"), "")
        function = "MOECCL_API size_t moecclTypeSize(moecclDataType_t type);"
        self.assertEqual(self.changed("types.h", function, function + "\nMOECCL_API int moecclGrown(int a);"), "")
        self.assertEqual(self.changed("types.h", "moecclSystemError = 1,", "moecclSystemError = 1, moecclGrown = 4711,"), "")

    def test_other_version_of_a_symbol_is_found(self):
        with tempfile.TemporaryDirectory() as place:
            with open(MAP, encoding="utf-8") as text, open(os.path.join(place, "map"), "w", encoding="utf-8") as copy:
                copy.write(text.read().replace("MOECCL_0.1", "MOECCL_9.9"))
            found = "\n".join(interface.differences(INCLUDE, version_script=os.path.join(place, "map")))
            self.assertTrue("moecclTypeSize@@MOECCL_0.1" in found, found[:300])

    def test_library_without_one_of_the_symbols_is_found(self):
        """A symbol that a header declares and nothing defines, as when a version script lacks a name."""
        with tempfile.TemporaryDirectory() as place:
            shutil.copytree(INCLUDE, place, dirs_exist_ok=True)
            with open(os.path.join(place, "moeccl/extra.h"), "w", encoding="utf-8") as text:
                text.write("MOECCL_API int moecclNobodyHasThis(int a);\n")
            with open(os.path.join(place, "moeccl/moeccl.h"), "a", encoding="utf-8") as text:
                text.write("#include <moeccl/extra.h>\n")
            found = list(interface.differences(place, os.environ["LIBMOECCL"]))
            self.assertEqual(len(found), 1, found)
            self.assertIn("moecclNobodyHasThis is not exported", found[0])


if __name__ == "__main__":
    if shutil.which("abidiff") is None or shutil.which("abidw") is None:
        print("skipped: no abidiff (tools/deps installs abigail-tools)")
        sys.exit(77)
    unittest.main()

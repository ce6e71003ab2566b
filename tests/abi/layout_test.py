# SPDX-License-Identifier: Apache-2.0
"""The layouts of the public headers grow only beyond those of version 0.1. (Python's are checked when they are generated.)"""
import os
import sys
import unittest

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE]
import layout  # noqa: E402


class Layout(unittest.TestCase):
    present = layout.measure(os.path.join(ROOT, "include/moeccl"))
    first = layout.measure(os.path.join(HERE, "v0.1/moeccl"))

    def test_new_fields_lie_behind_the_old_struct(self):
        """What an older program leaves in the padding of its last word must not become a field's value."""
        for name, old in self.first["structs"].items():
            for field, (offset, _) in self.present["structs"][name]["fields"].items():
                if field not in old["fields"]:
                    self.assertGreaterEqual(offset, old["size"], f"{name}.{field}")

    def test_every_sized_struct_has_a_row_in_adopt(self):
        with open(os.path.join(ROOT, "src/base/adopt.cc"), encoding="utf-8") as text:
            rows = text.read()
        for name, old in self.first["structs"].items():
            if "size" in old["fields"]:
                self.assertIn(f"MOECCL_SIZED({name}, {old['size']})", rows)
        for name, new in self.present["structs"].items():
            if "size" in new["fields"]:
                self.assertIn(f"MOECCL_SIZED({name}, ", rows)


if __name__ == "__main__":
    unittest.main()

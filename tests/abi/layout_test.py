"""The layouts of the public headers: growth beside version 0.1, and what bindings/python/moeccl.py says of them."""
import ctypes
import os
import sys
import unittest

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(ROOT, "bindings/python")]
import layout  # noqa: E402
import moeccl  # noqa: E402


class Layout(unittest.TestCase):
    present = layout.measure(os.path.join(ROOT, "include/moeccl"))
    first = layout.measure(os.path.join(HERE, "v0.1/moeccl"))

    def test_new_fields_lie_behind_the_old_struct(self):
        """What an older program leaves in the padding of its last word must not become a value."""
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

    def test_python_lays_structs_out_as_c_does(self):
        kinds = {"moeccl" + name.lstrip("_") + end: kind for name, kind in vars(moeccl).items()
                 if isinstance(kind, type) and issubclass(kind, ctypes.Structure) for end in ("", "_t")}
        checked = 0
        for name, struct in self.present["structs"].items():
            kind = kinds.get(name)
            if kind is None:
                continue
            checked += 1
            fields = {f: [getattr(kind, f).offset, getattr(kind, f).size] for f, *_ in kind._fields_}
            self.assertEqual(fields, struct["fields"], name)
            self.assertEqual(ctypes.sizeof(kind), struct["size"], name)
        self.assertGreaterEqual(checked, 5)

    def test_python_numbers_are_the_headers(self):
        numbers = {name.lower(): value for name, value in self.present["enumerators"].items()}
        checked = 0
        for name, value in vars(moeccl).items():
            want = numbers.get("moeccl" + name.replace("_", "").lower()) if name.isupper() and name[0] != "_" else None
            if want is not None:
                self.assertEqual(value, want, name)
                checked += 1
        self.assertGreaterEqual(checked, 17)


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes moeccl/_abi.py, the C interface for ctypes, from the public headers, and writes a C file that checks it.

  generate_abi.py --include include --python _abi.py --check abi_check.c [--cc COMMAND...]

The headers go through the C preprocessor and pycparser. The C file contains static assertions for the size of each structure, the
offset and size of each field, and each enumerator and constant, as this program understood them. It is compiled with the library,
so a difference between ctypes and the C compiler stops the build."""
import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile

from pycparser import c_ast, c_parser

# These replace the system's headers, whose attributes pycparser cannot read; the C file checks the sizes.
TYPES = {"size_t": ("unsigned long", "c_size_t"), "int8_t": ("signed char", "c_int8"), "uint8_t": ("unsigned char", "c_uint8"),
         "int16_t": ("short", "c_int16"), "uint16_t": ("unsigned short", "c_uint16"), "int32_t": ("int", "c_int32"),
         "uint32_t": ("unsigned int", "c_uint32"), "int64_t": ("long", "c_int64"), "uint64_t": ("unsigned long", "c_uint64")}
BASIC = {"char": "c_char", "int": "c_int", "float": "c_float", "double": "c_double", "void": None}

HEAD = '''"""The C interface by its C names: structures, constants, prototypes. Generated from include/moeccl by generate_abi.py."""
import ctypes
import dataclasses
from ctypes import c_char, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Dict, Tuple


class Structure(ctypes.Structure):
    """A structure that begins as its header's _INIT says: with its size, and with what is not zero by default."""
    _defaults_: Dict[str, Any] = {}

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{**self._defaults_, **fields})
        if "size" in self._defaults_:
            self.size = ctypes.sizeof(self)


'''
TAIL = '''

def declare(library: ctypes.CDLL) -> None:
    """Gives each function of the library its prototype."""
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def lib() -> ctypes.CDLL:
    """The loaded library, with the prototypes of all functions."""
    from ._library import lib as loaded
    return loaded
'''


def preprocess(compiler, include, text, *options):
    """Returns the preprocessed text, with our own <stddef.h> and <stdint.h>."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("stddef.h", "stdint.h"):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as header:
                header.write("#ifndef NULL\n#define NULL 0\n" +
                             "".join(f"typedef {c} {n};\n" for n, (c, _) in TYPES.items()) + "#endif\n")
        command = [*compiler, "-E", "-P", "-x", "c", "-std=c11", "-nostdinc", "-U__GNUC__", f"-I{folder}", f"-I{include}", *options, "-"]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


class Reader:
    """The declarations of the headers, in the order of the headers."""

    def __init__(self, compiler, include):
        self.enums, self.structs, self.functions, self.handles = {}, {}, {}, []
        self.constants, self.defaults, self.numbers = {}, {}, {}
        text = "#include <moeccl/moeccl.h>\n"
        macros = dict(re.findall(r"^#define (MOECCL_\w+) (.+)$", preprocess(compiler, include, text, "-dM"), re.M))
        for name, value in sorted(macros.items()):
            if value.startswith("{"):
                kind = re.search(r"sizeof\((\w+)\)", value)[1]
                text += f"{kind} default_{kind} = {name};\n"
            elif re.match(r"[\d(]", value):
                text += f"long constant_{name} = {name};\n"
        for node in c_parser.CParser().parse(preprocess(compiler, include, text)).ext:
            self.declaration(node)

    def declaration(self, node):
        kind = node.type
        if isinstance(node, c_ast.Typedef):
            if node.name in TYPES:
                return
            inner = getattr(kind, "type", None)
            if isinstance(kind, c_ast.PtrDecl):
                self.handles.append(node.name)
            elif isinstance(inner, c_ast.Enum):
                self.enums[node.name] = {}
                for item in inner.values.enumerators:
                    self.numbers[item.name] = self.enums[node.name][item.name] = self.number(item.value)
            elif isinstance(inner, c_ast.Struct):
                self.structs[node.name] = [(field.name, self.ctype(field.type)) for field in inner.decls]
            else:  # another name for a number
                TYPES[node.name] = ("", self.ctype(kind))
        elif isinstance(kind, c_ast.FuncDecl):
            given = [p.type for p in kind.args.params] if kind.args else []
            arguments = [self.ctype(t, True) for t in given]
            self.functions[node.name] = (self.ctype(kind.type, True), [a for a in arguments if a is not None])
        elif node.name.startswith("constant_"):
            self.constants[node.name[len("constant_"):]] = self.number(node.init)
        elif node.name.startswith("default_"):
            name = node.name[len("default_"):]
            self.defaults[name] = {field: value for (field, _), item in list(zip(self.structs[name], node.init.exprs))[1:]
                                   if not isinstance(item, c_ast.InitList) and (value := self.number(item))}
        else:
            raise SystemExit(f"generate_abi.py cannot read the declaration of {node.name}")

    def number(self, node):
        """Returns the value of a constant expression."""
        if isinstance(node, c_ast.Constant):
            return float(node.value) if node.type in ("float", "double") else int(node.value, 0)
        if isinstance(node, c_ast.ID):
            return self.numbers[node.name]
        if isinstance(node, c_ast.UnaryOp) and node.op == "-":
            return -self.number(node.expr)
        if isinstance(node, c_ast.BinaryOp):
            left, right = self.number(node.left), self.number(node.right)
            return {"+": left + right, "-": left - right, "*": left * right, "<<": left << right}[node.op]
        raise SystemExit(f"generate_abi.py cannot read the number at {node.coord}")

    def ctype(self, node, argument=False):
        """Returns the ctypes expression for a C type; in an argument a pointer is an address."""
        if isinstance(node, c_ast.ArrayDecl) and not argument:
            return f"{self.ctype(node.type)} * {self.number(node.dim)}"
        if isinstance(node, (c_ast.PtrDecl, c_ast.ArrayDecl)):
            target, constant = self.ctype(node.type), "const" in getattr(node.type, "quals", [])
            if target == "c_char" and constant:
                return "c_char_p"
            if target is None or argument and target not in self.structs:
                return "c_void_p"
            return f"ctypes.POINTER({target})"
        name = " ".join(node.type.names) if isinstance(node.type, c_ast.IdentifierType) else None
        if name in BASIC:
            return BASIC[name]
        if name in TYPES:
            return TYPES[name][1]
        if name in self.enums:
            return "c_int"
        if name in self.handles:
            return "c_void_p"
        if name in self.structs:
            return name
        raise SystemExit(f"generate_abi.py does not know the type at {node.coord}")


def records(reader):
    """Writes, for each structure that the library fills in, a dataclass with the same fields: text as str, arrays as tuples."""
    plain = {"c_int": "int", "c_float": "float", "c_double": "float"}
    rows = []
    for name, fields in reader.structs.items():
        # Skip structures that a caller fills in, whose names show it, their parts, and the routings' pointers to tables.
        if re.search(r"(Config|Problem|ReplicaCost|Curve|Contention|Placement|Dispatch|Codec|UniqueId|ExpertLayer|ExpertUse|RoutingInfo|RoutingDeviceInfo)(_t)?$", name):
            continue
        rows.append(f'\n\n@dataclasses.dataclass(frozen=True)\nclass {name[len("moeccl"):].removesuffix("_t")}:\n    """What {name} says."""\n')
        for field, kind in fields:
            base, _, extent = kind.partition(" * ")
            pointer = re.fullmatch(r"ctypes.POINTER\((\w+)\)", base)
            base = pointer[1] if pointer else base
            python = base[len("moeccl"):].removesuffix("_t") if base in reader.structs else plain.get(base, "int")
            if field != "size":
                rows.append(f"    {field}: " + ("str" if base == "c_char" else f"Tuple[{python}, ...]" if extent or pointer else python) + "\n")
    return rows


def python_text(reader):
    rows = [HEAD]
    for name, value in reader.constants.items():
        rows.append(f"{name} = {value}\n")
    for name, values in reader.enums.items():
        rows.append(f"\n# {name}\n" + "".join(f"{n} = {v}\n" for n, v in values.items()))
    for name, fields in reader.structs.items():
        defaults = {**({"size": 0} if fields[0][0] == "size" else {}), **reader.defaults.get(name, {})}
        rows.append(f"\n\nclass {name}(Structure):\n    _fields_ = [\n")
        rows += [f'        ("{field}", {kind}),\n' for field, kind in fields]
        rows.append("    ]\n" + (f"    _defaults_ = {defaults}\n" if defaults else ""))
    rows += records(reader)
    rows.append("\n\nENUMS: Dict[str, Dict[str, int]] = {\n")
    rows += [f'    "{name}": {values},\n' for name, values in reader.enums.items()]
    rows.append("}\n\n# Each function's result and arguments; a pointer to numbers is an address.\nPROTOTYPES: Dict[str, Tuple[Any, Tuple[Any, ...]]] = {\n")
    for name, (result, arguments) in reader.functions.items():
        rows.append(f'    "{name}": ({result}, ({"".join(a + ", " for a in arguments).rstrip()})),\n')
    return "".join(rows) + "}\n" + TAIL


def check_text(reader, python):
    """Returns static assertions about the layout that ctypes gives the generated module."""
    made = {"__name__": "moeccl._abi"}
    exec(compile(python, "_abi.py", "exec"), made)  # this text is our own
    rows = ["/* Generated by generate_abi.py: moeccl/_abi.py beside the C compiler. */\n#include <moeccl/moeccl.h>\n#include <stddef.h>\n"]
    for name, (_, kind) in TYPES.items():
        rows.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(getattr(ctypes, kind))}, "{name}");\n')
    for name in reader.structs:
        kind = made[name]
        rows.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, "{name}");\n')
        for field, *_ in kind._fields_:
            at = getattr(kind, field)
            rows.append(f'_Static_assert(offsetof({name}, {field}) == {at.offset}, "{name}.{field}");\n'
                        f'_Static_assert(sizeof((({name}*)0)->{field}) == {at.size}, "{name}.{field}");\n')
    for name in reader.enums:
        rows.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(ctypes.c_int)}, "{name}");\n')
    for name, value in {**reader.numbers, **reader.constants}.items():
        rows.append(f'_Static_assert({name} == {value}, "{name}");\n')
    return "".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("include", "python", "check"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--copy", help="a second place for the Python file: the package in the build folder")
    parser.add_argument("--cc", nargs="+", default=["cc"])
    given = parser.parse_args()
    reader = Reader(given.cc, given.include)
    python = python_text(reader)
    check = check_text(reader, python)
    for path, text in ((given.python, python), (given.check, check), *([(given.copy, python)] if given.copy else [])):
        with open(path, "w", encoding="utf-8") as out:
            out.write(text)


if __name__ == "__main__":
    sys.exit(main())

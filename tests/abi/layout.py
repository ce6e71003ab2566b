# SPDX-License-Identifier: Apache-2.0
"""Reads what the public headers of a folder fix for compiled programs: structs with the offsets of their fields, and the
numbers of enumerators. As a program, prints them as the static assertions that freeze a release:

  tests/abi/layout.py include/moeccl > tests/abi/v0.2/layout.inc"""
import glob
import json
import os
import re
import subprocess
import sys
import tempfile


def bare(path):
    with open(path, encoding="utf-8") as text:
        return re.sub(r"/\*.*?\*/", "", text.read(), flags=re.S)


def structs(folder):
    """Yields (name, fields) of each struct, in the order of the headers."""
    for path in sorted(glob.glob(os.path.join(folder, "*.h"))):
        for body, name in re.findall(r"typedef struct \{([^{}]*)\} (moeccl\w+);", bare(path)):
            fields = []
            for declaration in filter(None, (" ".join(d.split()) for d in body.split(";"))):
                fields += [re.search(r"(\w+)(\[\w+\])?$", part.strip())[1] for part in declaration.split(",")]
            yield name, fields


def enumerators(folder):
    for path in sorted(glob.glob(os.path.join(folder, "*.h"))):
        for body in re.findall(r"typedef enum[^{]*\{([^{}]*)\}", bare(path)):
            yield from re.findall(r"(moeccl\w+)\s*=", body)


def measure(folder, compiler="cc"):
    """Returns {"structs": {name: {"size": bytes, "fields": {field: [offset, bytes]}}}, "enumerators": {name: number}}."""
    rows = ["#include <stdio.h>", "#include <moeccl/moeccl.h>", "int main(void) {", 'printf("{\\"structs\\": {");']
    for n, (name, fields) in enumerate(structs(folder)):
        rows.append(f'printf("{", " if n else ""}\\"{name}\\": {{\\"size\\": %zu, \\"fields\\": {{", sizeof({name}));')
        for m, field in enumerate(fields):
            rows.append(f'printf("{", " if m else ""}\\"{field}\\": [%zu, %zu]", offsetof({name}, {field}), '
                        f'sizeof((({name}*)0)->{field}));')
        rows.append('printf("}}");')
    rows.append('printf("}, \\"enumerators\\": {");')
    for n, name in enumerate(enumerators(folder)):
        rows.append(f'printf("{", " if n else ""}\\"{name}\\": %d", (int){name});')
    rows.append('printf("}}"); return 0; }')
    with tempfile.TemporaryDirectory() as place:
        source, program = os.path.join(place, "a.c"), os.path.join(place, "a")
        with open(source, "w", encoding="utf-8") as text:
            text.write("\n".join(rows))
        subprocess.run([compiler, "-std=c11", "-I", os.path.dirname(os.path.abspath(folder)), source, "-o", program],
                       check=True)
        return json.loads(subprocess.run([program], capture_output=True, text=True, check=True).stdout)


def assertions(folder):
    found = measure(folder)
    yield "/* Written by tests/abi/layout.py. Compiled with the headers of this release and with the present ones. */"
    for name, layout in found["structs"].items():
        yield f"STRUCT({name}, {layout['size']}, {int(next(iter(layout['fields'])) == 'size')})"
        for field, (offset, size) in layout["fields"].items():
            yield f"FIELD({name}, {field}, {offset}, {size})"
    for name, number in found["enumerators"].items():
        yield f"NUMBER({name}, {number})"


if __name__ == "__main__":
    print("\n".join(assertions(sys.argv[1])))

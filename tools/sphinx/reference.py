# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of the reference that are made from sources: one for each public header, one for each Python module.

  reference.py FOLDER_OF_PAGES"""
import importlib.util
import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../..")
# In the order in which a reader needs them.
HEADERS = {
    "types": "Types and conventions", "comm": "Communicators, streams and memory", "elastic": "Shrinking and growing",
    "collectives": "Standard collectives",
    "moe": "MoE layers: dispatch and combine", "plan": "Plans", "profile": "Profiles and calibration", "experts": "Replicated experts",
    "hybrid": "Hybrid expert domains", "migrate": "Expert migration", "gradient": "Compressed return of gradients", "codec": "The residual codec", "replace": "Re-placing combine", "swap": "Expert swap",
    "pipeline": "Tensor-parallel AllToAll", "solve": "Placement solvers", "simulate": "Simulation", "topology": "Topology",
    "status": "What processes do and wait for", "version": "Version"}
# Read with the others, but has no declarations of its own.
UMBRELLA = {"moeccl"}


def write(folder, name, text):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        file.write(text)


def introduction(header):
    header = re.sub(r"\A.*SPDX-License-Identifier.*\n", "", header)
    comment = re.search(r"/\*(.*?)\*/", header, re.S)[1]
    lines = [re.sub(r"^ ?\* ?", "", line).rstrip() for line in comment.strip("\n").splitlines()]
    return "\n".join(lines).strip()


def c_pages(folder):
    there = {name[:-2] for name in os.listdir(os.path.join(ROOT, "include/moeccl")) if name.endswith(".h")}
    if there - UMBRELLA != set(HEADERS):
        sys.exit(f"tools/sphinx/reference.py lists other headers than include/moeccl has: {sorted((there - UMBRELLA) ^ set(HEADERS))}")
    for name, title in HEADERS.items():
        with open(os.path.join(ROOT, f"include/moeccl/{name}.h"), encoding="utf-8") as file:
            words = introduction(file.read())
        write(folder, f"{name}.md", f"# {title}\n\nThis page is made from `moeccl/{name}.h`.\n\n```text\n{words}\n```\n\n"
                                    f"```{{doxygenfile}} {name}.h\n:sections: func typedef enum struct innerclass define\n```\n")
    pages = "\n".join(HEADERS)
    write(folder, "index.md", "# C interface\n\nThis is the reference of the headers in `include/moeccl`. `moeccl/moeccl.h` includes them all. "
                              "Read the conventions in [types.h](types.md) first.\n\n```{toctree}\n:maxdepth: 1\n\n" + pages + "\n```\n")


def python_pages(folder):
    """Writes pages only where the package has been built (build/bindings/python)."""
    found = importlib.util.find_spec("moeccl")
    if found is None or not found.submodule_search_locations:
        return
    base = found.submodule_search_locations[0]
    modules = []
    for here, folders, names in os.walk(base):
        folders[:] = [f for f in folders if not f.startswith("_")]
        package = ["moeccl", *[p for p in os.path.relpath(here, base).split(os.sep) if p != "."]]
        for name in sorted(names):
            if name == "__init__.py":
                modules.append(".".join(package))
            elif name.endswith(".py") and not name.startswith("_"):
                modules.append(".".join([*package, name[:-3]]))
    modules.sort()
    for module in modules:
        options = "" if module == "moeccl" else "   :members:\n   :show-inheritance:\n"
        write(folder, f"{module}.rst", f"{module}\n{'=' * len(module)}\n\n.. automodule:: {module}\n{options}")
    write(folder, "index.md", "# Python interface\n\nThis is the reference of the package `moeccl`, made from its docstrings. "
                              "[Python](../../python.md) shows how to use it.\n\n```{toctree}\n:maxdepth: 1\n\n" + "\n".join(modules) + "\n```\n")


def main():
    pages = sys.argv[1]
    c_pages(os.path.join(pages, "reference/c"))
    python_pages(os.path.join(pages, "reference/python"))


if __name__ == "__main__":
    main()

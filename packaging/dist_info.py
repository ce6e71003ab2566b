# SPDX-License-Identifier: Apache-2.0
"""dist_info.py PYPROJECT VERSION FOLDER: writes the metadata that a wheel would bring into FOLDER: name, version, what it needs,
extras and entry points, by which torch finds the backend. Meson installs them beside the package."""
import os
import sys

try:
    import tomllib
except ImportError:  # Python before 3.11
    import tomli as tomllib


def main(pyproject, version, folder):
    with open(pyproject, "rb") as file:
        project = tomllib.load(file)["project"]
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {version}", f"Summary: {project['description']}",
             f"License: {project['license']}", f"Requires-Python: {project['requires-python']}"]
    for extra, needs in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {need}; extra == "{extra}"' for need in needs]
    entry_points = []
    for group, entries in project["entry-points"].items():
        entry_points += [f"[{group}]"] + [f"{name} = {value}" for name, value in entries.items()] + [""]
    for name, text in {"METADATA": lines, "INSTALLER": ["meson"], "entry_points.txt": entry_points}.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as out:
            out.write("\n".join(text) + "\n")


if len(sys.argv) == 4:  # without arguments: Meson asks whether TOML can be read
    main(*sys.argv[1:])

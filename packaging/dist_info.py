# SPDX-License-Identifier: Apache-2.0
"""dist_info.py PYPROJECT SITE INSTALLER: writes SITE/moeccl-VERSION.dist-info, the metadata that a wheel would bring: name, version,
what it needs, extras and entry points. Meson installs modules alone."""
import os
import subprocess
import sys

try:
    import tomllib
except ImportError:  # Python before 3.11
    import tomli as tomllib

pyproject, site, installer = sys.argv[1:]
with open(pyproject, "rb") as file:
    project = tomllib.load(file)["project"]
root = os.path.dirname(os.path.abspath(pyproject))
version = project.get("version") or subprocess.run(["sh", os.path.join(root, "tools/version")], capture_output=True, text=True,
                                                   check=True).stdout.strip()
lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {version}", "License: Apache-2.0"]
if "description" in project:
    lines.append(f"Summary: {project['description']}")
if "requires-python" in project:
    lines.append(f"Requires-Python: {project['requires-python']}")
lines += [f"Requires-Dist: {need}" for need in project.get("dependencies", [])]
for extra, needs in project.get("optional-dependencies", {}).items():
    lines.append(f"Provides-Extra: {extra}")
    lines += [f'Requires-Dist: {need.split(";")[0].strip()}; extra == "{extra}"' for need in needs]
entry_points = []
for group, entries in project.get("entry-points", {}).items():
    entry_points += [f"[{group}]"] + [f"{name} = {value}" for name, value in entries.items()] + [""]

folder = os.path.join(site, f"{project['name'].replace('-', '_')}-{version}.dist-info")
os.makedirs(folder, exist_ok=True)
for name, text in {"METADATA": lines, "INSTALLER": [installer], "entry_points.txt": entry_points}.items():
    if text:
        with open(os.path.join(folder, name), "w", encoding="utf-8") as out:
            out.write("\n".join(text) + "\n")

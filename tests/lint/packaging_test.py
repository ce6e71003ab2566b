# SPDX-License-Identifier: Apache-2.0
"""The recipes of packaging/ fit the tree: versions, Meson options, packages and their files. A release has a date."""
import ast
import os
import re
import subprocess
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
# Meson's built-in options that the recipes set.
BUILTIN = {"buildtype", "optimization", "b_ndebug"}


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as text:
        return text.read()


def unknown_options(recipe):
    """Returns the options that a recipe gives to Meson and that meson_options.txt does not have."""
    known = set(re.findall(r"^option\('(\w+)'", read("meson_options.txt"), flags=re.M)) | BUILTIN
    return sorted(set(re.findall(r"-D(\w+)=", recipe)) - known)


def wrong_releases(changelog):
    """Returns the headings of versions that have neither a date nor, in the first heading only, `unreleased`."""
    headings = re.findall(r"^## (.*)", changelog, flags=re.M)
    return [h for i, h in enumerate(headings)
            if not re.fullmatch(r"\d+\.\d+\.\d+ \(" + (r"(unreleased|\d{4}-\d\d-\d\d)" if i == 0 else r"\d{4}-\d\d-\d\d") + r"\)", h)]


class Packaging(unittest.TestCase):
    version = subprocess.run([os.path.join(ROOT, "tools/version")], capture_output=True, text=True, check=True).stdout.strip()

    def test_versions_are_the_headers(self):
        self.assertEqual(re.search(r'set version = "(.*?)"', read("packaging/conda/meta.yaml"))[1], self.version)
        self.assertEqual(re.search(r'^version = "(.*?)"', read("bindings/deep_ep/pyproject.toml"), flags=re.M)[1], self.version)
        self.assertEqual(re.match(r"moeccl \((.*?)-\d+\)", read("packaging/debian/changelog"))[1], self.version)
        self.assertTrue(re.search(r"^## (\S+)", read("CHANGELOG.md"), flags=re.M)[1] == self.version)

    def test_releases_have_dates(self):
        self.assertEqual(wrong_releases(read("CHANGELOG.md")), [])
        self.assertEqual(wrong_releases("## 0.2.0 (unreleased)\n## 0.1.0 (unreleased)\n## 0.0.1\n"), ["0.1.0 (unreleased)", "0.0.1"])

    def test_options_exist(self):
        for recipe in ("packaging/debian/rules", "packaging/conda/build.sh", "packaging/spack/package.py"):
            self.assertEqual(unknown_options(read(recipe)), [], recipe)
        self.assertEqual(unknown_options("meson setup -Dtests=false -Dnowhere=1"), ["nowhere"])

    def test_spack_recipe_is_python(self):
        tree = ast.parse(read("packaging/spack/package.py"))
        (recipe,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        self.assertEqual(recipe.name, "Moeccl")
        self.assertEqual([b.id for b in recipe.bases], ["MesonPackage"])
        for call in ast.walk(recipe):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "depends_on":
                variant = next((k.value.value for k in call.keywords if k.arg == "when"), "+").lstrip("+").split(" ")[0]
                self.assertTrue(not variant or f'variant("{variant}"' in read("packaging/spack/package.py"), variant)

    def test_debian_files_belong_to_packages(self):
        packages = set(re.findall(r"^Package: (\S+)", read("packaging/debian/control"), flags=re.M))
        self.assertEqual(packages, {"libmoeccl0", "libmoeccl-dev", "moeccl-tools", "python3-moeccl"})
        for name in os.listdir(os.path.join(ROOT, "packaging/debian")):
            kind = name.rpartition(".")[2]
            if kind in ("install", "symbols", "manpages", "docs"):
                self.assertIn(name[:-len(kind) - 1], packages)
        for test in re.findall(r"^Tests: (.*)", read("packaging/debian/tests/control"), flags=re.M):
            for name in test.split():
                self.assertTrue(os.access(os.path.join(ROOT, "packaging/debian/tests", name), os.X_OK), name)


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""Sphinx's settings. tools/site copies this file beside the pages and runs Sphinx."""
import os
import re
import sys
from unittest.mock import MagicMock

project = "MoECCL"
copyright = "the MoECCL authors, Apache-2.0"  # pylint: disable=redefined-builtin
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]
exclude_patterns = ["profiles"]

breathe_projects = {"moeccl": os.environ["MOECCL_SITE_XML"]}
breathe_default_project = "moeccl"
breathe_domain_by_extension = {"h": "c"}
breathe_order_parameters_first = True

autodoc_mock_imports = ["torch", "numpy"]
# moeccl.jax sets items of JAX's tables when it is imported, which Sphinx's own substitutes do not take.
for module in ("jax", "jax.numpy", "jax._src", "jax._src.core", "jax.extend", "jax.extend.core", "jax.interpreters"):
    sys.modules[module] = MagicMock(Array=type("Array", (), {"__module__": "jax"}))
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True

html_theme = "sphinx_rtd_theme"
html_theme_options = {"navigation_depth": 3, "collapse_navigation": True}
html_static_path = []
html_show_sphinx = False
html_copy_source = False

# Pages that may be missing: the first is made only where the Python package has been built.
OPTIONAL = {"reference/python/index"}


def exists(page):
    return os.path.exists(os.path.join(os.path.dirname(os.path.realpath(__file__)), page + ".md"))


def adapt(_app, name, source):
    """Changes what holds only for the site: a link to a header goes to its page of the reference, links to other files
    outside of docs lose their target, and the list of decisions becomes a tree."""
    up = "../" * name.count("/")
    text = re.sub(r"\]\((?:\.\./)+include/moeccl/(\w+)\.h\)", rf"]({up}reference/c/\1.md)", source[0])
    text = re.sub(r"\[([^\]\n]+)\]\(" + re.escape("../" + up) + r"[^)\s]+\)", r"`\1`", text)
    if name == "index":
        text = "".join(line for line in text.splitlines(True) if line.strip() not in OPTIONAL or exists(line.strip()))
    if name == "decisions":
        text += "\n```{toctree}\n:hidden:\n:glob:\n\ndecisions/*\n```\n"
    source[0] = text


def plain_docstring(_app, _what, _name, _thing, _options, lines):
    """Docstrings are plain text: the first paragraph becomes one, and the rest keeps its columns."""
    text = [line.rstrip() for line in lines]
    end = text.index("") if "" in text else len(text)
    rest = text[end:]
    lines[:] = [re.sub(r"([\\*_`|])", r"\\\1", line.strip()) for line in text[:end]]
    if any(rest):
        lines += ["", ".. code-block:: text", "", *["   " + line for line in rest], ""]


def setup(app):
    app.connect("source-read", adapt)
    app.connect("autodoc-process-docstring", plain_docstring)

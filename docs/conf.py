"""Sphinx: `python -m sphinx -W docs build/site` makes the pages; tests/test_docs.py does, and runs their code."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import forge_ugc  # noqa: E402

project = "Forge-UGC"
version = release = forge_ugc.__version__
html_title = f"Forge-UGC {version}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
nitpicky = False

default_role = "literal"  # `x` in docstrings, as in Markdown
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
autodoc_default_options = {"members": True, "exclude-members": "__init__, __new__"}
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False

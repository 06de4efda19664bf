"""Sphinx's settings; `make docs` builds with warnings as errors."""

from __future__ import annotations

project = "composable_fsdp"
author = "the composable_fsdp authors"
copyright = f"2026, {author}"
release = "0.1.0"

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
nitpicky = True

html_theme = "furo"
html_title = "composable_fsdp"

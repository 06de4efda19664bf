"""Sphinx's settings; `make docs` builds with warnings as errors."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

project = "composable_fsdp"
author = "the composable_fsdp authors"
copyright = f"2026, {author}"
release = "0.2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
nitpicky = True

html_theme = "furo"
html_title = f"composable_fsdp {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

# A copied console block holds the commands alone, without prompts and output.
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"

autodoc_typehints = "signature"
autodoc_member_order = "bysource"

# Types of other packages have no pages here; the build reads nothing from a network.
nitpick_ignore_regex = [("py:.*", ".*")]

SECTION = re.compile(r"(Args|Returns|Return|Raises|Collective|Example|Yields):\s*(.*)")


def restructured(lines: list[str]) -> list[str]:
    """Return a docstring's lines with sections as reStructuredText.

    ``Returns: text``, whose later lines are indented, becomes a paragraph with a bold
    word. ``Args:`` becomes a list, with an item per argument.
    """
    result: list[str] = []
    in_args, in_section = False, False
    for line in lines:
        text = line.strip()
        started = SECTION.match(line)
        if started and not text.endswith("::"):
            in_args, in_section = started[1] == "Args", True
            result += ["", f"**{started[1]}:** {started[2]}".rstrip(), ""][
                : 3 - (not in_args)
            ]
        elif in_section and line.startswith("    "):
            item = (
                re.match(r"    ([\w*][\w*, ]*):(?: (.*)|$)", line) if in_args else None
            )
            if item:
                name = item[1].replace("*", r"\*")
                result.append(f"* **{name}**: {item[2] or ''}".rstrip())
            else:
                result.append(f"  {text}" if in_args else text)
        else:
            if text and in_section:
                in_args = in_section = False
                result.append("")
            result.append(line)
    return result


def setup(app: Sphinx) -> None:
    """Let autodoc read the docstrings of this project."""

    def process(
        app: Sphinx,
        what: str,
        name: str,
        obj: object,
        options: object,
        lines: list[str],
    ) -> None:
        lines[:] = restructured(lines)

    app.connect("autodoc-process-docstring", process)

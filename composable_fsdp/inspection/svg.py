"""Builds SVG as text: elements, scales and colors of the pictures of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH = 960
"""Width of every picture, in units of its own; the page scales the picture."""

# Colors that differ in brightness, too, so that they are told apart in gray.
COLORS = (
    "#4269d0",
    "#efb118",
    "#6cc5b0",
    "#ff725c",
    "#a463f2",
    "#97bbf5",
    "#9c6b4e",
    "#3ca951",
    "#ff8ab7",
    "#9498a0",
)

_DARK = ("#4269d0", "#a463f2", "#9c6b4e", "#3ca951")
"""Colors on which a label is white."""

CHARACTER = 6.4
"""Width of a character at the font size of the pictures, for a fit of labels."""


def color(index: int) -> str:
    """Return the color of the thing with this number."""
    # After the last color the first comes again; neighbors always differ.
    return COLORS[index % len(COLORS)]


def element(
    name: str, *inside: str, title: str | None = None, **attributes: object
) -> str:
    """Return an element; an underscore in an attribute's name stands for a hyphen.

    Args:
        name: the tag.
        *inside: the content, which is SVG already.
        title: text that a browser shows under the pointer. Default None: no text.
        **attributes: the attributes; numbers are rounded.

    Returns: the element as text.
    Collective: none.
    """
    # ``class_`` is ``class``, which Python reserves.
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
    )
    # A browser looks for the title in the first place of an element.
    told = f"<title>{escape(title)}</title>" if title is not None else ""
    return f"<{name}{written}>{told}{''.join(inside)}</{name}>"


def _number(value: object) -> str:
    """Return a value of an attribute as text; two decimals are enough for a screen."""
    return (
        f"{value:.2f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else str(value)
    )


def text(x: float, y: float, words: str, **attributes: str) -> str:
    """Return a text.

    Args:
        x: left end; with ``text_anchor`` the middle or the right end.
        y: the baseline.
        words: the text; special characters are escaped.
        **attributes: as in ``element``.

    Returns: the element as text.
    Collective: none.
    """
    return element("text", escape(words), x=float(x), y=float(y), **attributes)


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    title: str | None = None,
    label: str = "",
) -> str:
    """Return a rectangle, with ``label`` in its middle if the label fits.

    Args:
        x: left side.
        y: upper side.
        width: width.
        height: height.
        fill: color, or a class of the page as "url(#...)".
        title: text under the pointer. Default None.
        label: text inside. Default: none.

    Returns: the elements as text.
    Collective: none.
    """
    # A piece of a few elements among millions is still a visible line.
    drawn = element(
        "rect",
        title=title,
        x=float(x),
        y=float(y),
        width=max(float(width), 0.5),
        height=float(height),
        fill=fill,
    )
    label = _fitting(label, int((width - 4) / CHARACTER))
    if label:
        kind = "in light" if fill in _DARK else "in"
        drawn += text(
            x + width / 2, y + height / 2 + 4, label, text_anchor="middle", class_=kind
        )
    return drawn


def _fitting(label: str, most: int) -> str:
    """Return ``label``, or the last components of its name, in ``most`` characters."""
    # The end of a name tells more than its beginning.
    while len(label) > most and "." in label:
        label = label.partition(".")[2]
    return label if len(label) <= most else ""


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return a line.

    Args:
        x1: x of the first end.
        y1: y of the first end.
        x2: x of the second end.
        y2: y of the second end.
        kind: the class of the line in the page's style.

    Returns: the element as text.
    Collective: none.
    """
    return element(
        "line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=kind
    )


def picture(height: float, about: str, parts: Sequence[str]) -> str:
    """Return a whole picture.

    Args:
        height: height, in the units of ``WIDTH``.
        about: text that is read to a person who does not see the picture.
        parts: the elements.

    Returns: the ``svg`` element as text.
    Collective: none.
    """
    # Each picture has its own pattern, so that a picture can be cut out of the page.
    hatch = (
        '<defs><pattern id="padding" width="6" height="6" '
        'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="#f2f2f2"/>'
        '<line x1="0" y1="0" x2="0" y2="6" stroke="#999" stroke-width="2"/>'
        "</pattern></defs>"
    )
    # Without a width and a height the page scales the picture to its column.
    return element(
        "svg",
        hatch,
        *parts,
        viewBox=f"0 0 {WIDTH} {height:.0f}",
        role="img",
        aria_label=about,
    )


def legend(y: float, entries: Sequence[tuple[str, str]]) -> tuple[str, float]:
    """Return a legend of (color, words) in rows from ``y`` on, and its lower end."""
    parts: list[str] = []
    x = 0.0
    for fill, words in entries:
        # The square, the gap behind it, the words, and a gap to the next entry.
        needed = 20 + CHARACTER * len(words) + 16
        # Begin a row if the entry does not fit behind the others.
        if x and x + needed > WIDTH:
            x, y = 0.0, y + 20
        parts.append(box(x, y, 12, 12, fill))
        parts.append(text(x + 17, y + 11, words))
        x += needed
    return "".join(parts), y + 24

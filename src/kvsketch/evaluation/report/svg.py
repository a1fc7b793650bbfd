"""Turns matplotlib's SVG into a part of a page: small, with descriptions, in the page's colours."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

#: Colours for a white background, which a page replaces by those that suit its own background.
INK, GRID = "#1f2328", "#d8dee4"


def described(
    svg: str,
    name: str,
    title: str,
    text: str,
    tips: Mapping[str, tuple[str, Sequence[str]]],
) -> ElementTree.Element:
    """matplotlib's SVG as an element without name spaces, with a title, a description and tips."""
    root = ElementTree.fromstring(svg[svg.index("<svg") :])
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key in [key for key in element.attrib if "}" in key]:
            element.set(key.rpartition("}")[2], element.attrib.pop(key))
        for key in ("d", "x", "y", "transform"):
            if key in element.attrib:
                element.set(key, _short(element.get(key, "")))
        if element.tag == "text":  # every label has a rotation by 0
            plain = element.get("transform", "").startswith("rotate(-0 ")
            if plain:
                del element.attrib["transform"]
        element.tail = None
        if not (element.text or "").strip():
            element.text = None
    for child in [x for x in root if x.tag in ("metadata", "title")]:
        root.remove(child)
    for element in list(root.iter()):
        _mark(element, tips)
    _rename(root, name)
    _flatten(root)
    root.attrib.pop("version", None)
    said = {"title": title, "desc": text}
    for place, (tag, words) in enumerate(said.items()):
        child = ElementTree.Element(tag, id=f"{name}-{tag}")
        child.text = words
        root.insert(place, child)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title")
    root.set("aria-describedby", f"{name}-desc")
    return root


def _mark(element: ElementTree.Element, tips: Mapping[str, tuple[str, Sequence[str]]]) -> None:
    """Add the method to a group of shapes, and titles to its points."""
    gid = element.get("id", "")
    method, said = tips.get(gid.removesuffix("-bars"), ("", ()))
    if method:
        element.set("data-method", method)
    if gid.endswith("-bars"):
        return
    if gid.startswith("text-"):
        element.set("class", "over")  # the pointer then reaches the cell below
    points = list(element.iter("use")) or list(element.iter("path"))
    if len(points) == len(said):
        for point, words in zip(points, said, strict=True):
            ElementTree.SubElement(point, "title").text = words


def _rename(root: ElementTree.Element, name: str) -> None:
    """Prefix the ids that are used with the figure's name, so that a page can have several figures,
    and remove all other ids."""
    text = ElementTree.tostring(root, encoding="unicode")
    used = set(re.findall(r'(?:url\(|href=")#([\w.-]+)', text))
    for element in root.iter():
        own = element.attrib.pop("id", None)
        if own in used:
            element.set("id", f"{name}-{own}")
        for key, value in element.attrib.items():
            if key in ("href", "clip-path", "style"):
                element.set(key, re.sub(r"(url\(|^)#([\w.-]+)", rf"\1#{name}-\2", value))


def _flatten(element: ElementTree.Element) -> None:
    """Replace groups without attributes by their children."""
    children = []
    for child in element:
        _flatten(child)
        children += list(child) if child.tag == "g" and not child.attrib else [child]
    element[:] = children


def _short(numbers: str) -> str:
    """Round coordinates to two decimals and put one space between them."""
    numbers = re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", numbers)
    return " ".join(numbers.split())


def for_page(root: ElementTree.Element, styles: dict[str, str]) -> ElementTree.Element:
    """A copy whose styles are replaced by classes, so that the page's style sheet can colour them.

    Args:
        styles: the class for each style. New styles are added to it.
    """
    root = copy.deepcopy(root)
    # The figure is 1.5 pixels wide for each point of the file, or as wide as the page allows.
    points = float(root.attrib.pop("width").removesuffix("pt"))
    del root.attrib["height"]
    root.set("style", f"max-width: {1.5 * points:.0f}px")
    next(root.iter("style")).text = None  # it would apply to the whole page
    for element in root.iter():
        style = element.attrib.pop("style", None)
        if style is not None:
            style = style.replace(INK, "currentColor").replace(GRID, "var(--grid)")
            element.set("class", styles.setdefault(style, f"s{len(styles)}"))
    return root

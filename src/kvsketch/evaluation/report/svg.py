"""matplotlib's SVG as part of a page: small, described, and in the colours of the page."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

#: replaced in a page by what suits its background; these are for a white one
INK, GRID = "#1f2328", "#d8dee4"


def described(
    svg: str,
    name: str,
    title: str,
    text: str,
    tips: Mapping[str, tuple[str, Sequence[str]]],
) -> ElementTree.Element:
    """matplotlib's SVG as an element without name spaces, with title, description and tips."""
    root = ElementTree.fromstring(svg[svg.index("<svg") :])
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key in [key for key in element.attrib if "}" in key]:
            element.set(key.rpartition("}")[2], element.attrib.pop(key))
        for key in ("d", "x", "y", "transform"):
            if key in element.attrib:
                element.set(key, _short(element.get(key, "")))
        if element.tag == "text":  # a rotation by nothing, in every label
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
    """Say which method a group of shapes belongs to, and what its points are."""
    gid = element.get("id", "")
    method, said = tips.get(gid.removesuffix("-bars"), ("", ()))
    if method:
        element.set("data-method", method)
    if gid.endswith("-bars"):
        return
    if gid.startswith("text-"):
        element.set("class", "over")  # lets the pointer through to its cell
    points = list(element.iter("use")) or list(element.iter("path"))
    if len(points) == len(said):
        for point, words in zip(points, said, strict=True):
            ElementTree.SubElement(point, "title").text = words


def _rename(root: ElementTree.Element, name: str) -> None:
    """Ids that are used get the figure's name in front, so that figures share a page; others go."""
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
    """Groups that say nothing give way to what is in them."""
    children = []
    for child in element:
        _flatten(child)
        children += list(child) if child.tag == "g" and not child.attrib else [child]
    element[:] = children


def _short(numbers: str) -> str:
    """Two decimals of a point are enough, and one space between them."""
    numbers = re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", numbers)
    return " ".join(numbers.split())


def for_page(root: ElementTree.Element, styles: dict[str, str]) -> ElementTree.Element:
    """A copy whose styles are classes of the page, so that its style sheet can colour them.

    Args:
        styles: names of classes by style, to which new ones are added.
    """
    root = copy.deepcopy(root)
    # pixels at 1.5 times the file's points: as wide as it is drawn, or as the page allows
    points = float(root.attrib.pop("width").removesuffix("pt"))
    del root.attrib["height"]
    root.set("style", f"max-width: {1.5 * points:.0f}px")
    next(root.iter("style")).text = None  # it would be for all of the page
    for element in root.iter():
        style = element.attrib.pop("style", None)
        if style is not None:
            style = style.replace(INK, "currentColor").replace(GRID, "var(--grid)")
            element.set("class", styles.setdefault(style, f"s{len(styles)}"))
    return root

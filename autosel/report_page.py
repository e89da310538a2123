"""The report as one HTML file that loads nothing: template, style, script and figures inside.

All data is escaped by the template engine. A Content-Security-Policy in the page lets run the one
script that this module wrote, known by its hash, and forbids every request, so that text from a
hostile checkpoint, device or pack stays text whatever it holds.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import autosel
from autosel import plots
from autosel.atomic import atomic_file
from autosel.errors import AutoselError, MissingPackageError, field_error
from autosel.evidence import Evidence
from autosel.plot_style import svg_text
from autosel.report_data import BATCH, report_data

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
#: Figures of one layer, and those of all layers together.
OF_LAYER = ("latency", "roofline", "noise", "bytes", "budget")
OF_ALL = ("crossover", "speedup", "cost")


def write_report(
    found: Sequence[Evidence],
    path: str | Path,
    *,
    title: str = "Which backend for the mixture-of-experts layers",
    batch: int = BATCH,
    baseline: str | None = None,
    place: str = "",
    figures: bool = True,
    made: str = "",
) -> Path:
    """Write the report of ``found`` to ``path`` (.html); it appears whole or not at all.

    batch     tokens that the summary speaks of
    baseline  backend that the speed-up figure compares with; vLLM's choice when left out
    place     the database or pack that it is about, for the printed commands
    made      when it was made, as it is shown; now when left out

    Raises AutoselError in one line where there is nothing to report or no place to write to.
    """
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise AutoselError(field_error(str(target), "suffix", repr(target.suffix), ".html"))
    if not target.absolute().parent.is_dir():
        parent = target.absolute().parent
        raise AutoselError(field_error(str(target), "folder", "nothing", f"a folder {parent}"))
    text = page(
        found, title=title, batch=batch, baseline=baseline, place=place, figures=figures, made=made
    )
    with atomic_file(target) as partial:
        partial.write_text(text, encoding="utf-8")
    return target


def page(
    found: Sequence[Evidence],
    *,
    title: str,
    batch: int = BATCH,
    baseline: str | None = None,
    place: str = "",
    figures: bool = True,
    made: str = "",
) -> str:
    """The whole page as text; see :func:`write_report`."""
    if not any(one.outcomes for one in found):
        raise AutoselError(field_error("report", "layers measured", "none", "a sweep first"))
    made = made or f"Made {datetime.now(UTC).strftime('%Y-%m-%d %H:%M')} UTC by autosel"
    data = report_data(found, title=title, made=made, batch=batch, place=place)
    drawn: dict[str, list[Any]] = {}
    for layer, svg in _figures(found, batch, baseline) if figures else ():
        drawn.setdefault(layer, []).append(svg)
    script, css = _resource("report.js"), _resource("report.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    markup, template = _template()
    text: str = template.render(
        data=data,
        figures=list(drawn.items()),
        policy=policy,
        css=markup(css),
        script=markup(script),
        version=autosel.__version__,
    )
    return text


def _template() -> tuple[Any, Any]:
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise MissingPackageError(
            field_error("report", "package jinja2", f"none ({error})", "pip install jinja2")
        ) from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return Markup, environment.from_string(_resource("report.html"))


def _resource(name: str) -> str:
    file = resources.files("autosel").joinpath("templates", name)
    return file.read_text(encoding="utf-8")


def _figures(
    found: Sequence[Evidence], batch: int, baseline: str | None
) -> Iterator[tuple[str, Any]]:
    """Inline figures, each with its layer (empty for all); a kind without data is left out."""
    markup, _ = _template()
    options = plots.Options(baseline=baseline)
    jobs: list[tuple[str, str, Sequence[Evidence], plots.Options]] = [
        ("", kind, found, options) for kind in OF_ALL
    ]
    for one in found:
        counts = one.token_counts
        nearest = min(counts, key=lambda n: (abs(n - batch), n), default=None)
        jobs += [(one.label, k, [one], replace(options, num_tokens=nearest)) for k in OF_LAYER]
    for number, (layer, name, shown, chosen) in enumerate(jobs):
        kind = plots.kind(name)
        try:
            drawn = kind.figure(shown, chosen)
        except MissingPackageError:
            raise
        except AutoselError:
            continue  # nothing of that kind was measured
        words = kind.describe(kind.table(shown, chosen))
        yield layer, markup(inline_svg(svg_text(drawn), f"f{number}", words))


def inline_svg(text: str, prefix: str, words: str) -> str:
    """An SVG document as an element of a page: its names made its own, ``words`` for readers.

    matplotlib gives equal names to the parts of every figure; in one page they would collide. Its
    global style is dropped for attributes on the element, and metadata goes. Anything that could
    run or load is refused.
    """
    root = ET.fromstring(text)
    for parent in list(root.iter()):
        for child in list(parent):
            tag = child.tag.rpartition("}")[2] if isinstance(child.tag, str) else ""
            if tag in ("metadata", "style"):
                parent.remove(child)
            elif tag in ("script", "foreignObject", "image", "a"):
                raise AutoselError(field_error("figure", "element", tag, "shapes and text alone"))
    for element in root.iter():
        if "id" in element.attrib:
            element.set("id", f"{prefix}-{element.get('id')}")
        for name, value in list(element.attrib.items()):
            if name.rpartition("}")[2] == "href":
                if not value.startswith("#"):
                    raise AutoselError(field_error("figure", "link", value, "a part of itself"))
                element.set(name, f"#{prefix}-{value[1:]}")
            elif "url(#" in value:
                element.set(name, re.sub(r"url\(#", f"url(#{prefix}-", value))
            elif name == "style" and "font:" in value:
                # Verdana has DejaVu's widths, for machines without it.
                element.set(name, value.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana"))
    title = ET.Element(f"{{{SVG}}}title", {"id": f"{prefix}-words"})
    title.text = words
    root.insert(0, title)
    root.set("role", "img")
    root.set("aria-labelledby", f"{prefix}-words")
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ET.register_namespace("", SVG)
        ET.register_namespace("xlink", XLINK)
    out = io.StringIO()
    ET.ElementTree(root).write(out, encoding="unicode", short_empty_elements=True)
    return out.getvalue()

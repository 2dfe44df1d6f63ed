"""The report as one HTML page: styles, scripts and data are in it, and it asks nobody for anything.

What users and models wrote is in the page as JSON only, with every character escaped that could end
a script, and reaches the eye as text nodes. The content security policy lets nothing run but the
page's own script, by its hash, and nothing be fetched but, from the live server, the data.
"""

from __future__ import annotations

import base64
import hashlib
import os
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path

import msgspec

from areal_ray.observability.report.data import ReportData, RunReader, check_is_run

SCRIPTS = (
    "scales.js",
    "charts.js",
    "curves.js",
    "timeline.js",
    "sections.js",
    "records.js",
    "report.js",
)
_ESCAPES = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)


def write_report(directory: Path, out: Path | None = None) -> Path:
    """Read the run's files and write its page, `report.html` in its directory if nowhere else is
    asked for. Blocks, for a minute on a run of days: call it off the event loop."""
    check_is_run(directory)
    reader = RunReader(directory)
    while reader.read():
        pass
    reader.read_samples()
    out = out or directory / "report.html"
    # Under another name first: whoever has the page open never sees half of it.
    written = out.with_name(f".{out.name}.{os.getpid()}")
    written.write_text(page(reader.data()), encoding="utf-8")
    os.replace(written, out)
    return out


def page(data: ReportData, *, refresh_s: float | None = None) -> str:
    """`refresh_s`: fetch `data.json` from where the page came from so often."""
    script = _asset_script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    source = "'none'" if refresh_s is None else "'self'"
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src {source}"
    )
    filled = {
        "policy": policy,
        "name": escape(data.summary.name),
        "styles": _asset("report.css"),
        "refresh": "" if refresh_s is None else f"{refresh_s:g}",
        "data": msgspec.json.encode(data).decode().translate(_ESCAPES),
        "script": script,
    }
    # By parts, not by replacing: what is filled in may itself look like a place to fill.
    parts = _asset("page.html").split("{{")
    return parts[0] + "".join(
        filled[key] + rest for key, _, rest in (part.partition("}}") for part in parts[1:])
    )


def _asset_script() -> str:
    return "\n".join(_asset(name) for name in SCRIPTS)


@cache
def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")

"""The page's files: linked, as they are served, and in one file with the values of a trace.

Importing this raises `TraceError` if plotly is missing, before any work starts.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from tvm_split.dashboard.state import Live, page_of
from tvm_split.errors import TraceError
from tvm_split.observing.trace import Trace

_HERE = resources.files("tvm_split.dashboard")
_PAGE, _STYLES, _SCRIPT = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
FILES = {"page.css": ("text/css; charset=utf-8", _STYLES), "page.js": ("text/javascript; charset=utf-8", _SCRIPT)}
LINKED = _PAGE.replace("<!--styles-->", '<link rel="stylesheet" href="page.css">').replace(
    "<!--scripts-->", '<script src="plotly.js"></script>\n<script src="page.js"></script>'
)
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""A saved page loads nothing."""


def _charts() -> bytes:
    """Return plotly.js, as plotly's package brings it. Raises `TraceError` if that is not installed."""
    try:
        return (resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    except (ModuleNotFoundError, OSError) as error:
        raise TraceError("the page needs plotly: pip install 'tvm-split[observe]'") from error


CHARTS = _charts()


def write(trace: Trace, path: Path) -> None:
    """Write the page of a trace as one file that needs no network."""
    # Nothing in JSON's texts may end the element.
    values = json.dumps(page_of(trace, Live()).as_values(), allow_nan=False).replace("<", "\\u003c")
    page = _PAGE.replace(
        "<!--styles-->", f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>{_STYLES}</style>'
    )
    before, after = page.split("<!--scripts-->")
    data = f'<script type="application/json" id="page-values">{values}</script>'
    scripts = f"{data}\n<script>{CHARTS.decode()}</script>\n<script>{_SCRIPT}</script>"
    path.write_text(f"{before}{scripts}{after}", encoding="utf-8")

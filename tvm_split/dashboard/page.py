"""The page: served over HTTP, as linked files and its values as JSON, and in one file with the values of a trace.

Importing this raises `TraceError` if plotly is missing, before any work starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rpc_runtime.errors import InputError
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.http_server import HttpServer
from tvm_split.dashboard.state import Live, Page, page_of
from tvm_split.errors import TraceError
from tvm_split.observing.trace import Trace

_HERE = resources.files("tvm_split.dashboard")
_PAGE, _STYLES, _SCRIPT = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
FILES = {"page.css": ("text/css; charset=utf-8", _STYLES), "page.js": ("text/javascript; charset=utf-8", _SCRIPT)}
LINKED = _PAGE.replace("<!--styles-->", '<link rel="stylesheet" href="page.css">').replace(
    "<!--scripts-->", '<script src="plotly.js"></script>\n<script src="page.js"></script>'
)
SAVED_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
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
        "<!--styles-->",
        f'<meta http-equiv="Content-Security-Policy" content="{SAVED_POLICY}">\n<style>{_STYLES}</style>',
    )
    before, after = page.split("<!--scripts-->")
    data = f'<script type="application/json" id="page-values">{values}</script>'
    scripts = f"{data}\n<script>{CHARTS.decode()}</script>\n<script>{_SCRIPT}</script>"
    path.write_text(f"{before}{scripts}{after}", encoding="utf-8")


POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:"
"""What the page may load (plotly.js writes styles)."""
HEADERS = (
    ("Content-Security-Policy", f"{POLICY}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
)
LOCAL = ("localhost", "127.0.0.1", "::1")


def page_server(listen: str, page: Callable[[], Page], *, insecure: bool = False) -> HttpServer:
    """Return a server of the page, until it is closed.

    There is no token, so the server listens on this host only. With ``insecure`` it may listen elsewhere: everyone who
    reaches it then learns the names of models, machines and layers.

    Raises:
        InputError: the address can be reached by other machines, without ``insecure``.
        WorkerError: nothing can listen at this address.
    """
    address = Address.parse(listen).numeric
    if not address.is_loopback and not insecure:
        raise InputError(
            f"other machines can reach {listen}, and the page needs no token: listen on 127.0.0.1 and look "
            "through ssh (ssh -L 8080:127.0.0.1:8080 HOST), or give --insecure on a network where you trust everyone"
        )
    return HttpServer(
        address, _application(page, (*LOCAL, address.host) if address.is_loopback else ()), "the dashboard"
    )


def _application(page: Callable[[], Page], names: Sequence[str]) -> Callable[..., Iterable[bytes]]:
    """Return the page's WSGI application; it refuses requests for a host not in ``names``, unless that is empty."""

    def values() -> bytes:
        return json.dumps(page().as_values(), allow_nan=False).encode()

    contents: dict[str, tuple[str, Callable[[], bytes]]] = {
        "/": ("text/html; charset=utf-8", lambda: LINKED.encode()),
        "/page.json": ("application/json", values),
        "/plotly.js": ("text/javascript; charset=utf-8", lambda: CHARTS),
        **{f"/{name}": (kind, text.encode) for name, (kind, text) in FILES.items()},
    }

    def application(request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        # A page of somebody else whose name leads to this host must not read this one.
        if names and urlsplit(f"//{request.get('HTTP_HOST', '')}").hostname not in names:
            return _refused(start, "403 Forbidden", f"open it by the name {' or '.join(names)}")
        if request["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _refused(start, "405 Method Not Allowed", "GET")
        if request["PATH_INFO"] not in contents:
            return _refused(start, "404 Not Found", "there are / and /page.json")
        kind, content = contents[request["PATH_INFO"]]
        body = content()
        caching = "max-age=3600" if request["PATH_INFO"] == "/plotly.js" else "no-store"
        start(
            "200 OK", [("Content-Type", kind), ("Cache-Control", caching), ("Content-Length", str(len(body))), *HEADERS]
        )
        return [body] if request["REQUEST_METHOD"] == "GET" else []

    return application


def _refused(start: Callable[..., Any], status: str, why: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8"), *HEADERS])
    return [f"{why}\n".encode()]

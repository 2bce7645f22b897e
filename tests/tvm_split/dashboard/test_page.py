"""The page in one file, and over HTTP."""

import http.client
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tvm_split
from tests.helpers.traces_of_runs import A, two_machines
from tvm_split.dashboard.page import page_server
from tvm_split.dashboard.state import Page
from tvm_split.observing.about import About, AboutStage
from tvm_split.observing.trace import Trace

HOSTILE = '</script><script>alert(1)</script><img src=x onerror=alert(1)> & "\u2028'


def get(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(server.address.host, server.address.port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()
    finally:
        connection.close()


def test_one_file_has_the_data_inside_and_names_stay_text(tmp_path: Path):
    trace = Trace(HOSTILE, two_machines().machines, About((AboutStage(HOSTILE, A, (HOSTILE,)),)))
    trace.save(tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    assert not re.search(r"(src|href)=\"(?!#|data:)", text.split("<main>")[0]), "nothing is loaded from elsewhere"
    assert "<script>alert" not in text
    assert "<img" not in text
    (values,) = re.findall(r'id="page-values">(.*?)</script>', text)
    assert json.loads(values)["model"] == HOSTILE
    assert len(json.loads(values)["machines"]) == 2
    assert HOSTILE in json.loads(values)["machines"][0]["stages"][0][1]


def test_what_is_served():
    pages = iter([Page("net", "running", results=7), Page("net", "failed", "it has gone")])
    with page_server("127.0.0.1:0", lambda: next(pages)) as server:
        status, headers, body = get(server, "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        for path in re.findall(rb'(?:src|href)="(page[^"]*|plotly[^"]*)"', body):
            assert get(server, f"/{path.decode()}")[0] == 200
        assert json.loads(get(server, "/page.json")[2])["results"] == 7
        assert json.loads(get(server, "/page.json")[2])["reason"] == "it has gone"


@pytest.mark.parametrize(
    ("method", "path", "host", "status"),
    [
        ("GET", "/../../etc/passwd", None, 404),
        ("GET", "/page.py", None, 404),
        ("POST", "/", None, 405),
        ("GET", "/page.json", "evil.example:8080", 403),
        ("GET", "/page.json", "evil.example", 403),
        ("GET", "/page.css", "LOCALHOST:8080", 200),
        ("GET", "/page.css", "127.0.0.1", 200),
        ("GET", "/page.css", "[::1]:8080", 200),
        ("HEAD", "/", None, 200),
    ],
)
def test_what_is_refused(method, path, host, status):
    with page_server("127.0.0.1:0", lambda: Page("secret")) as server:
        answered, _, body = get(server, path, method, **({} if host is None else {"Host": host}))
    assert answered == status
    assert b"secret" not in body


def test_a_caller_that_says_nothing_keeps_nobody_waiting():
    with page_server("127.0.0.1:0", lambda: Page("net")) as server:
        silent = [socket.create_connection((server.address.host, server.address.port)) for _ in range(3)]
        assert get(server, "/page.json")[0] == 200
        for connection in silent:
            connection.close()


def test_it_is_for_this_host():
    with pytest.raises(tvm_split.InputError, match="ssh -L"):
        page_server("0.0.0.0:0", lambda: Page("net"))
    with page_server("0.0.0.0:0", lambda: Page("net"), insecure=True) as server:
        assert server.address.port
    with (
        page_server("127.0.0.1:0", lambda: Page("net")) as server,
        pytest.raises(tvm_split.WorkerError, match="cannot serve the dashboard on"),
    ):
        page_server(str(server.address), lambda: Page("net"))


def test_without_plotly():
    """The package is missing before any work starts, and the message says what to install."""
    code = (
        "import sys; sys.modules['plotly'] = None\n"
        "from tvm_split.observing.trace import writer_for\n"
        "writer_for('run.html')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install 'tvm-split[observe]'" in ended.stderr

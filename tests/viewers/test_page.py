"""The page in a real browser: while ResNet-50 runs, beside a slow link, after a worker was killed, and saved."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

import tvm_split
from rpc_runtime.client.worker_client import describe
from tests.helpers.relay import Relay
from tests.viewers.lab import FOLDER, Run
from tvm_split.cluster.machine import Link, Machine
from tvm_split.observing.about import About, AboutStage
from tvm_split.observing.trace import Trace

X = np.zeros((1, 3, 224, 224), np.float32)
A, B = "machine-a", "machine-b"
SLOW_BYTES_PER_SECOND = 10e6
PATIENCE_MILLISECONDS = 120_000
PHONE = {"viewport": {"width": 390, "height": 844}}
DARK = {"color_scheme": "dark"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "the page is tested with Debian's Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str, **how: object) -> Iterator[Page]:
    """Open the page; nothing may fail in it, or be loaded from elsewhere."""
    with browser.new_context(**how) as context:
        page, problems = context.new_page(), []
        page.set_default_timeout(PATIENCE_MILLISECONDS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: problems.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: None if _is_own(request.url, url) else problems.append(request.url))
        page.goto(url)
        page.wait_for_selector("body[data-drawn]")
        yield page
        assert not problems


def _is_own(requested: str, url: str) -> bool:
    return requested.startswith((url, "data:", "blob:"))


def require_accessible(page: Page) -> None:
    found = Axe().run(page).response["violations"]
    serious = [one["id"] for one in found if one["impact"] in ("serious", "critical")]
    assert not serious, [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found]


def require_no_overflow(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@contextmanager
def streaming(deployment: tvm_split.Deployment) -> Iterator[None]:
    ended = threading.Event()

    def stream() -> None:
        try:
            for _ in deployment.stream(itertools.takewhile(lambda _: not ended.is_set(), itertools.repeat((X,)))):
                pass
        except tvm_split.TvmSplitError:
            return

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def picture(page: Page, name: str) -> None:
    """Keep a picture for people to look at."""
    (FOLDER / "pictures").mkdir(exist_ok=True)
    page.screenshot(path=FOLDER / "pictures" / f"{name}.png", full_page=True)


def test_a_stream_and_the_loss_of_a_machine(browser: Browser, bundle: tvm_split.Bundle) -> None:
    with (
        tvm_split.Cluster.local(2) as cluster,
        tvm_split.deploy(bundle, cluster, on_failure="raise") as deployment,
    ):
        server = deployment.dashboard()
        with opened(browser, server.url) as page, streaming(deployment):
            page.wait_for_selector("body[data-state=running]")
            page.wait_for_selector("#rates .trace, #rates .scatterlayer .trace")
            # Details stay open while the page is drawn anew, and the keyboard's focus stays.
            summary = page.locator("#machines summary").first
            summary.focus()
            page.keyboard.press("Enter")
            results = page.locator("#numbers dd").nth(6)
            expect(results).not_to_have_text(results.text_content(), timeout=PATIENCE_MILLISECONDS)
            assert page.locator("#machines details[open]").count() == 1
            assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
            assert "conv1" in page.locator("#machines details[open] ul").inner_text()
            page.click("#pause")
            assert page.get_attribute("#pause", "aria-pressed") == "true"
            assert page.text_content("#state") == "paused"
            page.click("#pause")
            page.wait_for_selector("body[data-state=running]")
            require_accessible(page)
            picture(page, "running")
            os.kill(describe(cluster.endpoints()[B]).process_id, signal.SIGKILL)
            page.wait_for_selector("body[data-state=failed]")
            expect(page.locator("#limit")).to_contain_text(f"{B} does not answer", timeout=PATIENCE_MILLISECONDS)
            assert B in page.text_content("#reason")
            assert "failed" in page.text_content("#events")
            require_accessible(page)
            picture(page, "failed")


def test_a_link_that_limits(browser: Browser, bundle: tvm_split.Bundle) -> None:
    with tvm_split.Cluster.local(2) as workers:
        ends = workers.endpoints()
        with Relay(ends[B].address, bytes_per_second=SLOW_BYTES_PER_SECOND) as relay:
            links = (
                Link(A, B, SLOW_BYTES_PER_SECOND, address=relay.address, transport="grpc"),
                *(Link("client", name, 1e9) for name in ends),
            )
            cluster = tvm_split.Cluster(tuple(Machine(name, 1, endpoint=end) for name, end in ends.items()), links)
            with tvm_split.deploy(bundle, cluster) as deployment, streaming(deployment):
                server = deployment.dashboard()
                with opened(browser, server.url, **DARK) as page:
                    limit = f"Limited by the link {A} → {B}"
                    expect(page.locator("#limit")).to_contain_text(limit, timeout=PATIENCE_MILLISECONDS)
                    assert page.locator("#links tr.limits").inner_text().startswith(f"{A} → {B}")
                    require_accessible(page)
                    picture(page, "slow-link-dark")
                with opened(browser, server.url, **PHONE) as page:
                    require_no_overflow(page)
                    require_accessible(page)
                    picture(page, "phone")


def test_a_saved_page_needs_no_network(browser: Browser, run: Run) -> None:
    path = run.folder / "run.html"
    run.trace.save(path)
    with opened(browser, path.as_uri(), offline=True) as page:
        assert page.text_content("#model") == "resnet50"
        assert page.locator("#machines .machine").count() == 2
        assert page.locator("#timeline .bars .point, #timeline .point").count() > 10
        assert not page.locator("#pause").is_visible()
        require_accessible(page)
        require_no_overflow(page)


def test_names_are_never_read_as_html(browser: Browser, run: Run, tmp_path: Path) -> None:
    name = '<img src=x onerror="alert(1)"><script>alert(2)</script></script>&amp;"\'`\u202e'
    (first, *rest) = run.trace.machines.items()
    machines = {f"{first[0]}{name}": first[1], **dict(rest)}
    about = About((AboutStage(name, f"{first[0]}{name}", (name,)),))
    trace = replace(Trace(name, machines), about=about)
    trace.save(tmp_path / "run.html")
    with opened(browser, (tmp_path / "run.html").as_uri(), **PHONE) as page:
        assert page.text_content("#model") == name
        assert page.locator("main img, main script").count() == 0
        require_no_overflow(page)


def test_the_end_of_the_server_is_told(browser: Browser, bundle: tvm_split.Bundle) -> None:
    with tvm_split.deploy(bundle, tvm_split.Cluster.in_process(2)) as deployment, browser.new_context() as context:
        page = context.new_page()
        page.goto(deployment.dashboard().url)
        page.wait_for_selector("body[data-drawn]")
        deployment.close()
        page.wait_for_selector("body[data-state=lost]", timeout=PATIENCE_MILLISECONDS)

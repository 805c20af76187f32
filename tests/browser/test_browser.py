"""In a real browser: JupyterLab opens a notebook, runs it and follows a slider; a report opens without network.

Run by `make test-browser`, which says how the browser is found. Debian's Chromium, driven by Playwright.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Request, expect, sync_playwright

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
MINUTES = 60_000  # milliseconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a JupyterLab that shows a copy of the notebooks."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    environment = os.environ | {"JUPYTER_CONFIG_DIR": str(folder / "config"), "PYTHONPATH": str(ROOT)}
    subprocess.run([BIN / "jupytext-config", "set-default-viewer", "python"], env=environment, check=True)
    command = [BIN / "jupyter", "lab", "--no-browser", "--allow-root", "--port=0", "--ServerApp.root_dir=notebooks"]
    server = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    address = next(
        found[0] for line in server.stderr if (found := re.search(r"http://127.0.0.1:\d+/lab\?token=\w+", line))
    )
    yield address
    server.terminate()
    server.wait(30)


def test_a_notebook_runs_in_jupyterlab_and_follows_its_slider(browser: Browser, lab: str):
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.goto(lab.replace("/lab?", "/lab/tree/03_the_lag_loop.py?"))
    expect(page.locator(".jp-Notebook .jp-MarkdownOutput h1")).to_have_text(re.compile("The lag loop"), timeout=MINUTES)
    expect(page.get_by_text("Python 3", exact=False).first).to_be_visible()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    figure = page.locator(".widget-html svg")
    expect(figure).to_have_count(1, timeout=MINUTES)
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    assert page.locator(".jp-RenderedImage img").count() == 2  # the static figures
    figure.scroll_into_view_if_needed()
    before = figure.inner_html()
    handle = page.locator(".widget-slider .noUi-handle").first
    handle.focus()
    handle.press("ArrowRight")
    page.wait_for_function("before => document.querySelector('.widget-html svg').innerHTML !== before", arg=before)
    page.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html of claims; every page has the one template."""
    folder = tmp_path_factory.mktemp("report") / "claims"
    command = [BIN / "mismatch", "claims", "C1", "C3", "N2", "--fast", "--json", "--out", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)
    return folder / "report.html"


def test_a_report_opens_with_no_error_and_no_request(browser: Browser, report: Path):
    page = browser.new_page()
    requests: list[Request] = []
    messages: list[ConsoleMessage] = []
    errors: list[Exception] = []
    page.on("request", lambda request: requests.append(request))
    page.on("console", lambda message: messages.append(message))
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(report.as_uri())
    page.wait_for_load_state("networkidle")
    assert [request.url for request in requests] == [report.as_uri()]
    assert not messages
    assert not errors
    assert page.locator("svg").count() >= 1
    assert page.locator("footer").inner_text()
    for svg in page.locator("svg").all():
        box = svg.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) > 50
    page.close()

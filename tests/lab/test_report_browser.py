"""The report in a real browser: Debian's Chromium, driven by Playwright, without a network."""

import csv
import io
import json
import shutil
import threading
from pathlib import Path

import pytest
from made_studies import plan_of, pretend, pretend_run, write_study
from test_report import BODY, EVIL, accuracy

from lowp.lab.report.document import report_document
from lowp.lab.results import study_results

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
sync_api = pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    pytest.importorskip("plotly")
    from lowp.lab.report.page import page_of

    where = tmp_path_factory.mktemp("browser")
    pretend(where / "s", plan_of(write_study(where, BODY, head="seeds = 4")), accuracy, health=True)
    (where / "report.html").write_text(
        page_of(report_document([study_results(where / "s")], "lowp report s")), encoding="utf-8"
    )
    return where / "report.html"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def open_page(browser, page_file):
    """A page that is ready. At the end: nothing was said on the console, and nothing was asked of a network."""
    said, asked = [], []

    def open_one(width: int, theme: str):
        screen = {"width": width, "height": 900}
        page = browser.new_context(viewport=screen, color_scheme=theme, offline=True, accept_downloads=True).new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-ready=yes]", timeout=120_000)
        return page

    yield open_one
    assert said == []
    assert {url for url in asked if not url.startswith(("data:", "blob:"))} == {page_file.as_uri()}


@pytest.fixture(scope="module")
def page(open_page):
    """To load a page takes seconds: all tests that change nothing for others share one."""
    return open_page(1280, "light")


def first_cells(page, table: str) -> list[str]:
    return page.eval_on_selector_all(f"#{table} tbody tr td:first-child", "cells => cells.map(cell => cell.textContent)")


def test_every_figure_is_drawn_and_says_what_it_shows(page):
    figures = page.eval_on_selector_all("figure", "all => all.map(each => each.id)")
    expected = [
        "pareto",
        "curves",
        "settings",
        "forest",
        "recipes",
        "trouble",
        "health",
        "exponents",
        "times",
        "memory",
        "runs",
    ]
    assert figures == [f"s0-{name}" for name in expected] + ["explorer-line", "explorer-error"]
    for name in figures:
        assert page.locator(f"#{name} figcaption .note").inner_text().count(".") >= 1
        assert page.locator(f"#{name} .foot code").inner_text().startswith("lowp ")
    plots = page.eval_on_selector_all(
        ".plot", "all => all.map(each => [each.getAttribute('aria-label'), each._fullData.length])"
    )
    assert len(plots) == 9
    assert all(label and traces for label, traces in plots)


def test_a_run_called_script_is_shown(page):
    assert EVIL in first_cells(page, "s0-settings")
    holders = "[...document.scripts].filter(each => each.textContent.includes('alert(1)')).map(each => each.id)"
    assert page.evaluate(holders) == ["report-data"]


def test_the_table_sorts_and_filters_by_keyboard(page):
    names = ["base", "good & cheap", EVIL, "lost"]
    assert first_cells(page, "s0-settings") == names
    head = page.locator("#s0-settings th", has_text="accuracy (%)")
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert first_cells(page, "s0-settings") == [EVIL, "base", "good & cheap", "lost"]  # what has no number comes last
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert first_cells(page, "s0-settings") == ["good & cheap", "base", EVIL, "lost"]
    page.locator("#s0-settings input[type=search]").fill("WORSE")
    assert first_cells(page, "s0-settings") == [EVIL, "lost"]
    assert "2 of 4" in page.locator("#s0-settings .controls").inner_text()


def test_downloads(page, tmp_path):
    with page.expect_download() as found:
        page.locator("[data-csv=s0-settings]").click()
    found.value.save_as(tmp_path / "t.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text())))
    block = json.loads(page.locator("#report-data").text_content())
    assert [row["setting"] for row in rows] == [row["setting"] for row in block["studies"][0]["settings"]]
    assert float(rows[0]["mean"]) == block["studies"][0]["settings"][0]["mean"]
    with page.expect_download() as found:
        page.locator("[data-png=s0-forest]").click()
    found.value.save_as(tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_explorer_reacts(page):
    def lost() -> list[str]:
        return page.eval_on_selector_all("#explorer-lost li", "all => all.map(each => each.textContent)")

    def choose(label: str, value: str) -> None:
        page.locator("#explorer-line label", has_text=label).locator("select").select_option(value)

    before = lost()
    assert [line.split(":")[0] for line in before] == ["e5m2", "e4m3fn", "int8"]
    choose("Format 1", "e2m1fn")
    assert lost()[0].startswith("e2m1fn: without a scale ")
    names = page.evaluate("document.querySelector('#explorer-line .plot')._fullData.map(each => each.name)")
    assert names[1:] == ["e2m1fn", "e4m3fn", "int8"]
    choose("Role", "weights")
    assert "of the weights" in lost()[0]
    choose("Format 3", "(none)")
    assert len(lost()) == 2


def test_health_of_another_role_and_layer(page):
    page.locator("#s0-health label", has_text="Role").locator("select").select_option("updates")
    page.locator("#s0-health label", has_text="Figure").locator("select").select_option("lost_updates")
    z = page.evaluate("document.querySelector('#s0-health .plot').data[0].z")
    assert z == [[0.2] * 3, [0.2] * 3]
    page.locator("#s0-exponents label", has_text="Layer").locator("select").select_option("layers.2")
    assert "updates, layer layers.2" in page.locator("#s0-exponents .plot").inner_text()


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1280, "light")])
def test_both_themes_at_two_widths(open_page, page, width, theme):
    """Nothing is wider than the screen, text has a contrast of at least 4.5 (WCAG AA), and every control has a name."""
    page = open_page(width, theme) if theme == "dark" else page
    for name in (theme, "light" if theme == "dark" else "dark"):
        assert page.evaluate("document.documentElement.dataset.theme") == name
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for colour in ("--ink", "--soft", "--accent", "--good", "--bad", "--open"):
            for ground in ("--paper", "--panel"):
                assert page.evaluate(CONTRAST, [colour, ground]) >= 4.5, (colour, ground)
        page.locator("#theme").click()
    assert page.evaluate(UNNAMED) == []


UNNAMED = """[...document.querySelectorAll('input, select, button')]
  .filter((each) => !each.labels?.length && !each.ariaLabel && !each.textContent.trim()).map((each) => each.outerHTML)"""


def test_a_live_page_loads_itself_again_when_a_run_is_there(browser, tmp_path):
    pytest.importorskip("plotly")
    from lowp.lab.live import LiveServer

    pretend_run(tmp_path / "one", 'name = "one"\n', 0.5)
    with LiveServer(tmp_path, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            page = browser.new_page()
            page.goto(server.address)
            page.wait_for_selector("html[data-ready=yes]", timeout=120_000)
            assert first_cells(page, "s0-settings") == ["one"]
            pretend_run(tmp_path / "two", 'name = "two"\nbatch = 8\n', 0.7)
            page.wait_for_selector("#s0-settings td:text-is('two')", timeout=120_000)
            page.close()
        finally:
            server.shutdown()
            thread.join()


CONTRAST = """([one, other]) => {
  const light = (name) => {
    const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
    const linear = parts.map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}"""

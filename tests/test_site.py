"""The site is built without a warning, its pages ask no other server for anything, and it has the whole public API."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import lowp

ROOT = Path(__file__).parents[1]
LOADS = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """What a page loads, where its links lead, and the places in it that links can lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if given.get("id"):
            self.ids.add(given["id"])
        if tag in LOADS and given.get(LOADS[tag]):
            self.loads.append(given[LOADS[tag]])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-b", "html"]
    ran = subprocess.run(
        [*command, "-d", str(folder / ".doctrees"), "docs", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_pages_load_nothing_from_elsewhere(site, pages):
    elsewhere = {load for page in pages.values() for load in page.loads if urlsplit(load).netloc}
    assert elsewhere == set()
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)]*", styles) == []


def test_links_between_pages_lead_somewhere(site, pages):
    """Files, and the places within pages."""
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            ids = pages[target].ids if target in pages else {parts.fragment}
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in ids):
                broken.append((path.name, link))
    assert broken == []


def test_the_whole_public_api_is_there(pages):
    ids = {name for page in pages.values() for name in page.ids}
    public = {name for name in dir(lowp) if not name.startswith("_")} - {"Any", "TYPE_CHECKING", "import_module"}
    public = {name for name in public if not isinstance(getattr(lowp, name), ModuleType)}
    public |= {"fsdp", "health", "optim", "predict"}
    described = {".".join(name.split(".")[:2]) for name in ids if name.startswith("lowp.")}
    assert {f"lowp.{name}" for name in public} - described == set()

"""Every file that the documentation names is there, and none is cited that readers do not have."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lowp"
# docs/LOG.md and CHANGELOG.md are dated: they may name what is gone today.
PAGES = [
    *(path for path in sorted(ROOT.glob("docs/*.md")) if path.name != "LOG.md"),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
]
PATH = re.compile(r"(?<![\w/.-])(?:src|tests|benchmarks|docs)/[\w./*-]*\w/?")  # from the root, wherever it stands in a text
NAME = re.compile(r"`(\w[\w./-]*(?:\.py|/))`")  # a module or a folder: `chunk_scheduler.py`, `tensor/node.py`, `models/`
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")  # [text](target) in this repository


def sections(text: str) -> list[tuple[str, str]]:
    """(heading, text below it), for the headings of the second level."""
    parts = re.split(r"^## +(.+)$", text, flags=re.MULTILINE)
    return [("", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]


def named(page: Path) -> set[tuple[str, tuple[Path, ...]]]:
    """What a page names, and the folders where that may be.

    In DESIGN.md a section is about a folder, and names without a folder are in that one.
    """
    found: set[tuple[str, tuple[Path, ...]]] = set()
    for heading, text in sections(page.read_text()):
        own = SOURCE / heading
        homes = (own, SOURCE) if heading and own.is_dir() else (page.parent, SOURCE)
        found |= {(path, (ROOT,)) for path in PATH.findall(text)}
        found |= {(name, homes) for name in NAME.findall(text) if not PATH.fullmatch(name)}
        found |= {(target, (page.parent,)) for target in LINK.findall(text)}
    return found


def is_there(name: str, homes: tuple[Path, ...]) -> bool:
    return any(next(home.glob(name.rstrip("/")), None) is not None for home in homes)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_are_there(page):
    assert [name for name, homes in sorted(named(page)) if not is_there(name, homes)] == []


def test_the_test_finds_names():
    """Or it would pass on everything."""
    assert len(named(ROOT / "docs" / "DESIGN.md")) > 60
    assert not is_there("swifter.py", (SOURCE / "wire",))


MODULES = [path for folder in ("src", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGE = re.compile(r"(?<![\w/])[A-Z]+\.md")  # a page without its folder is one beside README.md


def test_what_the_code_cites_is_there():
    """Pages, tests and files that docstrings and comments send a reader to."""
    gone = [
        (str(module.relative_to(ROOT)), name)
        for module in MODULES
        if module != Path(__file__)
        for pattern in (PATH, PAGE)
        for name in pattern.findall(module.read_text())
        if not is_there(name, (ROOT,))
    ]
    assert gone == []


def test_nothing_beside_the_repository_is_cited():
    """The folder `shared` lies beside the authors' checkout: readers do not have it."""
    shared = "shared" + "/"  # in two pieces: this file is read, too
    texts = [*MODULES, *ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), ROOT / "Makefile"]
    assert [str(path.relative_to(ROOT)) for path in texts if shared in path.read_text()] == []

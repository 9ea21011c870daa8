"""Every file that the documentation names is there, and none is cited that readers do not have."""

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import lowp
from lowp.cli import app
from lowp.training.keys import kind_at
from lowp.training.reading import _regrouped

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lowp"
# docs/LOG.md and CHANGELOG.md are dated: they may name what is gone today.
PAGES = [
    *(path for path in sorted(ROOT.glob("docs/**/*.md")) if path.name != "LOG.md"),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
]
PATH = re.compile(r"(?<![\w/.-])(?:src|tests|benchmarks|docs|\.ci)/[\w./*-]*\w/?")  # from the root, anywhere in a text
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
        homes = (own, SOURCE) if heading and own.is_dir() else (page.parent, SOURCE, ROOT)
        found |= {(path, (ROOT,)) for path in PATH.findall(text)}
        found |= {(name, homes) for name in NAME.findall(text) if not PATH.fullmatch(name)}
        found |= {(target, (page.parent,)) for target in LINK.findall(text)}
    return found


def is_there(name: str, homes: tuple[Path, ...]) -> bool:
    return any(next(home.glob(name.rstrip("/")), None) is not None for home in homes)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page):
    assert [name for name, homes in sorted(named(page)) if not is_there(name, homes)] == []


TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
COMMANDS = {command.name or command.callback.__name__ for command in app.registered_commands}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_that_a_page_names_are_there(page):
    """`make TARGET`, and `lowp COMMAND`."""
    text = page.read_text()
    assert [target for target in re.findall(r"`make ([a-z-]+)", text) if target not in TARGETS] == []
    assert [
        command for command in re.findall(r"(?:`|^\$? *)lowp ([a-z]+)", text, re.MULTILINE) if command not in COMMANDS
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_python_that_a_page_names_are_there(page):
    """`lowp.health.watch(...)`: modules, classes, functions and their attributes."""
    assert [name for name in re.findall(r"`(lowp(?:\.\w+)+)", page.read_text()) if not resolves(name)] == []


def resolves(name: str) -> bool:
    found: Any = lowp
    for part, dotted in zip(name.split(".")[1:], accumulate(name.split("."), "{}.{}".format), strict=False):
        if not hasattr(found, part) and find_spec_of(f"{dotted}.{part}"):
            import_module(f"{dotted}.{part}")
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def find_spec_of(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def unknown_keys(text: str) -> list[str]:
    """Keys behind `--set` that no recipe has. Names of layers may stand inside: precision.layers.last.weights."""
    keys = re.findall(r"--set [\"']?([\w.]+)=", text)
    return [
        key for key in keys if key != "KEY" and kind_at(_regrouped(tuple(key.split(".")))) is None and ".options." not in key
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_keys_that_a_page_sets_are_there(page):
    assert unknown_keys(page.read_text()) == []


def test_keys_in_docstrings_are_there():
    assert [(path, found) for path in SOURCE.rglob("*.py") if (found := unknown_keys(path.read_text()))] == []
    assert unknown_keys("lowp train fp32 --set data.path=/data --set wire.layers.last=fp16") == ["data.path"]


STEP = re.compile(r"`((?:\w+/)*\w+\.py): (\w+)(?:\.(\w+))?`")


def test_names_in_files_that_design_sends_readers_to_are_there():
    """`file.py: name` or `file.py: Class.method`, of the wire."""
    steps = STEP.findall((ROOT / "docs/DESIGN.md").read_text())
    for file, name, method in steps:
        defined = {node.name: node for node in ast.parse((SOURCE / "wire" / file).read_text()).body if hasattr(node, "name")}
        assert name in defined, (file, name)
        assert not method or method in {getattr(node, "name", "") for node in defined[name].body}, (file, name, method)
    assert len(steps) > 20


def test_design_names_every_module_of_tensor_and_wire():
    design = (ROOT / "docs/DESIGN.md").read_text()
    modules = [path for folder in ("tensor", "wire") for path in (SOURCE / folder).rglob("*.py")]
    ours = [path for path in modules if path.name != "__init__.py" and path.parent.name != "reductions"]
    assert [path.name for path in ours if not re.search(rf"[`/]{path.name}", design)] == []


def test_the_test_finds_names():
    """Or it would pass on everything."""
    assert len(named(ROOT / "docs" / "DESIGN.md")) > 60
    assert not is_there("swifter.py", (SOURCE / "wire",))
    assert {"train", "quantize"} <= COMMANDS
    assert {"test", "readme"} <= TARGETS
    assert [resolves(name) for name in ("lowp.health.watch", "lowp.formats.reference.round", "lowp.health.wach")] == [
        True,
        True,
        False,
    ]


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


CITED = re.compile(r"(?<![\w/.\"'{}-])((?:\w+/)*\w+\.py)\b(?![\"']|:\d)")


def test_modules_that_docstrings_cite_are_there():
    """`kernels.py` in a text is in the same folder or one of those around it; `tensor/kernels.py` counts from the package."""
    gone = [
        (str(module.relative_to(ROOT)), name)
        for module in SOURCE.rglob("*.py")
        for name in CITED.findall(module.read_text())
        if not is_there(name, (*(folder for folder in module.parents if folder.is_relative_to(SOURCE.parent)), ROOT))
    ]
    assert gone == []


def test_nothing_beside_the_repository_is_cited():
    """The folder `shared` lies beside the authors' checkout: readers do not have it."""
    shared = "shared" + "/"  # in two pieces: this file is read, too
    texts = [*MODULES, *ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), ROOT / "Makefile"]
    assert [str(path.relative_to(ROOT)) for path in texts if shared in path.read_text()] == []


def text_constants(module: Path) -> list[str]:
    """The texts of a module; in an f-string, each piece between two values."""
    return [
        node.value
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_messages_that_troubleshooting_lists_are_in_the_code():
    page = (ROOT / "docs/guides/troubleshooting.md").read_text()
    code = "\n".join(text for module in SOURCE.rglob("*.py") for text in text_constants(module))
    foreign = {"lowp: command not found", "Illegal instruction", "could not create a primitive"}
    messages = [
        message for heading in re.findall(r"^### (.+)$", page, re.MULTILINE) for message in re.findall(r"`([^`]+)`", heading)
    ]
    pieces = [piece.strip(" ,:") for message in messages if message not in foreign for piece in message.split("...")]
    gone = [piece for piece in pieces if len(piece) > 5 and piece not in code]
    assert len(pieces) > 30
    assert gone == []


def test_the_table_of_steps_is_that_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    step_table = import_module("benchmarks.step_table")
    readme = (ROOT / "README.md").read_text()
    assert step_table.rewritten(readme) == readme, "`make readme` writes it"

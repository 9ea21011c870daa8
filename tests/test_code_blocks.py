"""Every ```python and ```sh block of README.md and docs/ runs as it is printed.

A page's blocks run from top to bottom, in one folder and, for Python, in one namespace: a page begins with what its later
blocks need. A block of Python or TOML whose first line is a comment with a file's name (`# train.py`) is a file: it is written,
and a later `sh` block of the page uses it. Other TOML is left alone.

An HTML comment on the line before a block says what is different about it:

    <!-- not run: two hosts -->     it is not run, for this reason
    <!-- slow: 40 s -->             it runs in `make test-slow`, together with the page's other blocks
"""

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
# docs/LOG.md is dated; transcripts show what was typed in another folder.
LEFT_OUT = {ROOT / "docs/LOG.md"}
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted(ROOT.glob("docs/**/*.md")) if p not in LEFT_OUT and "transcripts" not in p.parts),
]
BLOCK = re.compile(r"^```(python|sh|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (not run|slow): (.+?) -->\n\Z")
FILE = re.compile(r"# ([\w./-]+\.(?:py|toml))\n")
MOST_NOT_RUN = 12  # of all pages


@dataclass(frozen=True)
class CodeBlock:
    page: Path
    line: int  # of its first line of code
    language: str
    code: str
    mark: str  # "", "not run" or "slow"
    reason: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[CodeBlock]:
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        mark = MARK.search(text[: match.start()])
        line = text.count("\n", 0, match.start()) + 2
        found.append(CodeBlock(page, line, match[1], match[2], *(mark.groups() if mark else ("", ""))))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
WITH_BLOCKS = sorted({block.page for block in BLOCKS})


def run_page(page: Path, folder: Path, slow: bool) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    blocks = [block for block in blocks_of(page) if block.mark == "" or (slow and block.mark == "slow")]
    for place, block in enumerate(blocks):
        if block.language == "sh":
            run_shell(block, folder)
        elif name := FILE.match(block.code):
            (folder / name[1]).write_text(block.code)
            later = "".join(after.code for after in blocks_of(page)[place:] if after.language == "sh")
            assert name[1] in later, f"{block.place}: no command of this page runs {name[1]}"
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.code, block.place.split(":")[0], "exec"), namespace)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def run_shell(block: CodeBlock, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Tests run side by side: each torchrun gets a port of its own, as by --master-port.
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PET_MASTER_PORT": str(free_port())}
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, f"{block.place}: exit code {ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr[-3000:]}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty one, with the repository's folders that pages name."""
    for name in ("studies", "examples"):
        if (ROOT / name).is_dir():
            (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run_as_printed(page, folder):
    run_page(page, folder, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in WITH_BLOCKS if any(b.mark == "slow" for b in blocks_of(p))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_slow_blocks_run_as_printed(page, folder):
    run_page(page, folder, slow=True)


def test_few_blocks_are_not_run():
    left_out = [block for block in BLOCKS if block.mark == "not run"]
    print(f"{len(left_out)} of {len(BLOCKS)} blocks are not run:")
    for block in left_out:
        print(f"  {block.place}: {block.reason}")
    assert len(left_out) <= MOST_NOT_RUN
    assert len(BLOCKS) > 20


def test_a_block_that_fails_is_found(tmp_path):
    page = ROOT / "docs" / "page-of-a-test.md"
    for code in ("```python\nx = 1\nundefined\n```", "```sh\ntrue\nlowp formats e4m3fm\n```"):
        block = next(BLOCK.finditer(code + "\n"))
        if block[1] == "sh":
            with pytest.raises(AssertionError, match="exit code"):
                run_shell(CodeBlock(page, 1, "sh", block[2], "", ""), tmp_path)
        else:
            with pytest.raises(NameError):
                exec(block[2], {})

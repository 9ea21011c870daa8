"""All benchmarks by name.

python -m benchmarks                                the list
python -m benchmarks NAME [--quick] [--out DIR]     one of them; NAME --help shows its other options
"""

import ast
import difflib
import os
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = (
    "operations",
    "links",
    "wire_cuda",
    "optim",
    "sixteen_bits",
    "simulate",
    "matmul",
    "papers",
    "train",
    "fashion",
    "davidnet",
)


def summary(name: str) -> str:
    """The first line of the benchmark's docstring, read without importing it: torch takes seconds."""
    module, package = FOLDER / f"{name}.py", FOLDER / name / "__main__.py"
    text = ast.get_docstring(ast.parse((module if module.exists() else package).read_text())) or ""
    return text.splitlines()[0]


def main(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        for name in NAMES:
            print(f"{name:14}{summary(name)}")
        return
    name, *options = words
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        sys.exit(f"there is no benchmark {name!r}{hint} The names are: {', '.join(NAMES)}")
    sys.argv = [f"benchmarks {name}", *options]
    # A script's folder comes first on the path; the processes that benchmarks start find the package by its parent folder
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(FOLDER.parent), os.environ.get("PYTHONPATH"))))
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main(sys.argv[1:])

"""All benchmarks by name.

python -m benchmarks                                the list
python -m benchmarks NAME [--quick] [--out DIR]     one of them; NAME --help shows its other options
"""

import ast
import importlib
import sys
from pathlib import Path

from lowp.names import did_you_mean

FOLDER = Path(__file__).parent
NAMES = (
    "operations",
    "links",
    "wire_cuda",
    "errors",
    "top_k",
    "optim",
    "sixteen_bits",
    "simulate",
    "matmul",
    "papers",
    "train",
    "fashion",
    "bits",
    "davidnet",
    "predict",
    "ablate",
    "at_once",
    "resnet50",
)


def module_of(name: str) -> str:
    return name if (FOLDER / f"{name}.py").exists() else f"{name}.__main__"


def summary(name: str) -> str:
    """The first line of the benchmark's docstring, read without importing it: torch takes seconds."""
    path = FOLDER / f"{module_of(name).replace('.', '/')}.py"
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def main(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        for name in NAMES:
            print(f"{name:14}{summary(name)}")
        return
    name, *options = words
    if name not in NAMES:
        sys.exit(f"there is no benchmark {name!r}; {did_you_mean(name, NAMES, 'there are ' + ', '.join(NAMES))}")
    sys.argv = [f"benchmarks {name}", *options]
    # Imported, not run as `__main__`: processes that it starts must find its functions
    importlib.import_module(f"benchmarks.{module_of(name)}").main()


if __name__ == "__main__":
    main(sys.argv[1:])

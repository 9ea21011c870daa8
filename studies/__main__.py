"""Studies of papers' claims: what each needs, what came of it, and its page.

    python -m studies                     the list; the pages in docs/studies and README's table are made again from the records
    python -m studies --check             are they as the records say? (changes nothing)
    python -m studies record RUNS...      directories of `lowp ablate` become records
    python -m studies smoke [PART...]     a few steps of every setting: does it run here, and how long would it take?
    python -m studies errors              the error table of the 8-bit types, which trains nothing

No GPU is needed but for runs themselves: each TOML says the command.
"""

import argparse
import json
import sys
from pathlib import Path

from studies.collection import FOLDER, Page, pages
from studies.pages import ROOT, need, runs_text, texts

from lowp.lab.records import record_of


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="studies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("list", "record", "smoke", "errors"), default="list")
    parser.add_argument("names", nargs="*", metavar="RUNS or PART")
    parser.add_argument("--check", action="store_true", help="only say whether pages and records agree")
    parser.add_argument("--data", type=Path, help="for smoke: where data sets lie")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for smoke: changes of all recipes")
    options = parser.parse_args(words)
    if options.command == "errors":
        from studies.eight_bit_errors import main as errors

        errors(FOLDER)
    if options.command == "record":
        for name in options.names:
            print(record(Path(name)))
    if options.command == "smoke":
        from studies.smoke import smoke

        return smoke([FOLDER / f"{name}.toml" for name in options.names], options.data, options.set)
    return show(pages(), check=options.check)


def record(directory: Path) -> Path:
    """Put the record of a study's directory beside the TOML that it was made of."""
    name = json.loads((directory / "plan.json").read_text())["name"]
    for page in pages():
        for part in page.parts:
            if part.study.name == name:
                part.record_path.write_text(record_of(directory))
                return part.record_path
    sys.exit(f"{directory}: no study here is called {name!r}")


def show(found: list[Page], *, check: bool) -> int:
    for page in found:
        print(f"{page.name}: {page.title} ({page.paper})")
        for part in page.parts:
            if part.record is None:
                print(f"    {part.name:16} not run: needs {need(part)}; {part.command}")
                continue
            print(f"    {part.name:16} {runs_text(part.record.results)}, recorded {part.record.recorded}; takes {need(part)}")
        for claim in page.claims:
            print(f"        {claim.judged.verdict:14} {claim.says}")
    stale = [path for path, text in texts(found).items() if not path.exists() or path.read_text() != text]
    if check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} does not agree with the records: make studies")
        return bool(stale)
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts(found)[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

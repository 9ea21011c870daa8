"""`python -m lowp` is `lowp`."""

from lowp.cli import app

app(prog_name="lowp")

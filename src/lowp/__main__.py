"""`python -m lowp` is `lowp`, for launchers that start modules: `torchrun ... -m lowp train ...`."""

from lowp.cli import app

app(prog_name="lowp")

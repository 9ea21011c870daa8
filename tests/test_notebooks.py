"""Every notebook runs, and was saved with the outputs that the site shows."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# In a process of its own: the warnings of Jupyter's packages are not errors here.
RUN = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": sys.argv[2]}}).execute()
"""


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["formats", "simulate", "wire"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # threads that wait would take the other worker's core
    command = [sys.executable, "-c", RUN, str(path), str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_saved_with_its_outputs(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) - 2  # imports and definitions print nothing
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)

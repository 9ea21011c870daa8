"""Named recipes. Each is a function that returns a complete recipe; a variant is another one and what it changes.

The docstring's first line is what `lowp recipes` lists, the rest what it explains. The modules enter theirs into RECIPES when
they are imported, here: the order is that of the list.
"""

from lowp.training.reading import with_changes as changed
from lowp.training.recipes import narrow, tasks
from lowp.training.recipes.precisions import fp32, pure16
from lowp.training.recipes.registry import RECIPES

__all__ = ["RECIPES", "changed", "fp32", "narrow", "pure16", "tasks"]

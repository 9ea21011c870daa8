"""How our operations appear in Dynamo's graph: as single calls, which AOTAutograd then traces through.

Dynamo would have to interpret all the Python that turns formats into constants. `torch.compiler.allow_in_graph` tells it not
to look inside; the compiler behind it sees every torch operation, or one node (node.py). But that call imports Dynamo, which
costs a second that `import lowp` must not. So it is made when Dynamo first gets here.
"""

from collections.abc import Callable
from typing import Any

import torch

from lowp.compat import constant_for_dynamo, let_dynamo_break_graphs
from lowp.formats import AnyFormat, FormatLike
from lowp.formats import format as parse_format
from lowp.formats.parse import text_of

_in_graph: list[Callable[..., Any]] = []


def in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function of tensors and plain constants as one call in Dynamo's graph (after `teach_dynamo`)."""
    _in_graph.append(function)
    return function


def teach_dynamo() -> bool:
    """Called while Dynamo traces: it runs functions with the mark below for real, where others are interpreted."""
    for function in _in_graph:
        torch.compiler.allow_in_graph(function)
    return True


def format_text(format: FormatLike) -> str:
    """A format's name, which a graph can hold."""
    return format if isinstance(format, str) else _text(format)


@constant_for_dynamo
def _text(format: AnyFormat) -> str:
    return text_of(parse_format(format))


def let_dynamo_fall_back() -> bool:
    """Called while Dynamo traces, after a call of ours has gone into its graph.

    Where a compiler cannot take an operation of the model (one whose backward pass asks for a number that is not known yet),
    Dynamo breaks the graph there; but not in a graph with functions that a user put into it, since they may be the reason.
    Ours never are.
    """
    let_dynamo_break_graphs()
    return True


def is_exporting() -> bool:
    """`torch.compiler.is_exporting()`, asked while Dynamo traces: torch 2.11 takes any tracing for an export."""
    return torch.compiler.is_exporting()


for _function in (teach_dynamo, let_dynamo_fall_back, is_exporting):
    constant_for_dynamo(_function)

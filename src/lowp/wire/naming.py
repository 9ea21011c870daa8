"""Names of parameters. A tied parameter has several, and any of them may stand in `skip=` and `layers=`.

`names` is a mapping from every name, in the order of registration, to the one name under which the parameter is known on the
wire: the first, as in `model.named_parameters()`.
"""

from collections.abc import Mapping

from torch import Size, nn


def all_names(model: nn.Module) -> dict[str, str]:
    """The names of a model's parameters that need gradients.

    >>> all_names(gpt2)["lm_head.weight"]
    'transformer.wte.weight'
    """
    first: dict[nn.Parameter, str] = {}
    everything = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    return {name: first.setdefault(parameter, name) for name, parameter in everything}


def last_layer(names: Mapping[str, str], shapes: Mapping[str, Size]) -> set[str]:
    """The parameters of the last layer that has a matrix: the head, and not a norm that is registered after it.

    In a tied model the head may have nothing of its own: then the embedding's matrix is the last layer's.
    """
    matrices = [name for name, known in names.items() if len(shapes[known]) > 1]
    if not matrices:
        return set()
    owner = matrices[-1].rpartition(".")[0]
    if not owner:  # parameters of the model itself: each is a layer
        return {names[matrices[-1]]}
    return {known for name, known in names.items() if name.rpartition(".")[0] == owner}

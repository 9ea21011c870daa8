"""Names of parameters. A tied parameter has several, and any of them may stand in `skip=` and `layers=`.

`names` is a mapping from every name, in the order of registration, to the one name under which the parameter is known on the
wire: the first, as in `model.named_parameters()`.
"""

from collections.abc import Mapping

from torch import Size, nn

from lowp.names import covers


def all_names(model: nn.Module) -> dict[str, str]:
    """The names of a model's parameters that need gradients.

    >>> all_names(gpt2)["lm_head.weight"]
    'transformer.wte.weight'
    """
    first: dict[nn.Parameter, str] = {}
    everything = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    return {name: first.setdefault(parameter, name) for name, parameter in everything}


def end_layers(names: Mapping[str, str], shapes: Mapping[str, Size]) -> dict[str, set[str]]:
    """The parameters of the "first" and of the "last" layer that has a matrix: the head, not a norm registered after it.

    In a tied model the head may have nothing of its own: then the embedding's matrix is the last layer's. A model that has
    something of that name means it by the word (names.py), and one without matrices has no such layers.
    """
    matrices = [name for name, known in names.items() if len(shapes[known]) > 1]
    ends = {"first": matrices[0], "last": matrices[-1]} if matrices else {}
    return {word: _layer_of(end, names) for word, end in ends.items() if not any(covers(word, name) for name in names)}


def _layer_of(parameter: str, names: Mapping[str, str]) -> set[str]:
    owner = parameter.rpartition(".")[0]
    if not owner:  # parameters of the model itself: each is a layer
        return {names[parameter]}
    return {known for name, known in names.items() if name.rpartition(".")[0] == owner}

"""Private interfaces of torch stand in `lowp/compat.py` alone, where each says what it is for and what happens without it."""

import ast
import inspect
import math
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from lowp import compat

SOURCE = Path(__file__).parents[1] / "src/lowp"
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
OF_PYTHON = {"_replace", "_getframe", "_current_frames", "_exit"}  # named tuples, sys, os


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def dotted(node: ast.expr) -> list[str]:
    """`a.b.c` as its three names; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def private_uses(text: str) -> Iterator[str]:
    """Imports of private modules or names of torch, and private names reached from what was imported from torch."""
    tree = ast.parse(text)
    of_torch = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [each for each in node.names if each.name.split(".")[0] == "torch"]
            of_torch.update(each.asname or "torch" for each in names)
            yield from (f"line {node.lineno}: {each.name}" for each in names if any(map(is_private, each.name.split("."))))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "torch":
            of_torch.update(each.asname or each.name for each in node.names)
            for each in node.names:
                if any(map(is_private, [*(node.module or "").split("."), each.name])):
                    yield f"line {node.lineno}: {node.module}.{each.name}"
    for node in ast.walk(tree):
        names = dotted(node) if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.Call) and dotted(node.func) in (["getattr"], ["hasattr"], ["setattr"]):
            name = str(getattr(node.args[1], "value", ""))
            if is_private(name) and not name.startswith("_lowp_"):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Constant) and re.fullmatch(r"torch\.[\w.]*\b_[\w.]+", str(node.value)):
            yield f"line {node.lineno}: {node.value!r}"
        if names and names[0] in of_torch and is_private(names[-1]) and not any(map(is_private, names[:-1])):
            yield f"line {node.lineno}: {'.'.join(names)}"


def own_names(tree: ast.AST) -> Iterator[str]:
    """What a module defines: functions, classes, variables and attributes of `self` or `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node)[:1] in (["self"], ["cls"]):
            yield node.attr


@pytest.mark.parametrize("file", [file for file in FILES if file != "compat.py"])
def test_private_names_of_torch_are_used_through_compat(file):
    assert list(private_uses((SOURCE / file).read_text())) == []


def test_private_attributes_are_our_own():
    """`x._name` of objects whose class is not known here: a private name that nobody in lowp defines is somebody else's."""
    trees = {file: ast.parse((SOURCE / file).read_text()) for file in FILES}
    own = {name for tree in trees.values() for name in own_names(tree)} | {"_lowp_layer"}
    known = own.union(OF_PYTHON, *compat.OF_SUBCLASSES.values())
    foreign = [
        f"{file}, line {node.lineno}: {ast.unparse(node)}"
        for file, tree in trees.items()
        if file != "compat.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in known
    ]
    assert foreign == []


def overrides(module) -> Iterator[tuple[type, str]]:
    """The private names that a class of a module shares with a class of torch that it is made from."""
    for own in vars(module).values():
        if inspect.isclass(own) and own.__module__ == module.__name__:
            for name in filter(is_private, vars(own)):
                for base in own.__mro__[1:]:
                    if base.__module__.partition(".")[0] == "torch" and name in vars(base):
                        yield base, name


def test_overridden_methods_of_torch_are_listed():
    found = set()
    for package in ("tensor", "wire", "optim", "simulation", "health", "training"):
        for file in sorted((SOURCE / package).rglob("*.py")):
            try:
                module = import_module(".".join(("lowp", *file.relative_to(SOURCE).with_suffix("").parts)))
            except ModuleNotFoundError as error:
                assert error.name == "triton"  # noqa: PT017  # which need not be installed
                continue
            found |= {(base.__name__, name) for base, name in overrides(module)}
    made_by_torch = {"_backward_cls", "_abc_impl"}  # of every subclass
    ours = {(base, name) for base, name in found if name not in made_by_torch}
    assert ("TorchDispatchMode", "_should_skip_dynamo") in ours
    assert {name for _, name in ours} <= set().union(*compat.OF_SUBCLASSES.values())


def test_what_torch_lacks_is_named(monkeypatch):
    lacking = compat._found("torch._C._not_there", "rounding on the moon")
    with pytest.raises(compat.MissingInTorch, match=r"^rounding on the moon needs torch\._C\._not_there, which torch .* 2\.11"):
        lacking(1)
    with pytest.raises(compat.MissingInTorch, match=r"^lowp\.fsdp needs FSDPModule"):
        compat.fsdp_parameters(object())


def test_loops_do_what_lists_do():
    x, y = [torch.tensor([1.0, -3.0]), torch.tensor(2.0)], [torch.tensor([4.0, 5.0]), torch.tensor(6.0)]
    assert [n.item() for n in compat._in_a_loop(torch.linalg.vector_norm)(x, math.inf)] == [3.0, 2.0]
    assert [n.item() for n in compat.foreach_norm(x, math.inf)] == [3.0, 2.0]
    compat._in_a_loop(torch.Tensor.mul_)(x, 2.0)
    assert [each.tolist() for each in x] == [[2.0, -6.0], 4.0]
    compat._in_a_loop(torch.Tensor.copy_)(x, y)
    assert [each.tolist() for each in x] == [[4.0, 5.0], 6.0]


def test_the_search_finds_them():
    text = """
import torch
import torch._dynamo as dynamo
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.autograd import _get_sequence_nr
torch._C._len_torch_dispatch_stack()
Tensor._make_subclass
torch.__version__, self._own, torch.nn.Module, "torch._C._nn"
getattr(tensor, "_cdata", None)
"""
    found = {use.split(": ")[1] for use in private_uses(text)}
    assert found == {
        "torch._dynamo", "torch.utils._pytree.tree_map", "torch.autograd._get_sequence_nr", "torch._C",
        "Tensor._make_subclass", "'torch._C._nn'", "getattr(tensor, '_cdata', None)",
    }  # fmt: skip

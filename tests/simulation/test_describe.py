"""The table of a simulated model: its rows, as text and with rich, and of a model that is not."""

import sys

import pytest
import torch
from torch import nn

from lowp.simulation import describe, restore, simulate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.relu(self.conv(x)).flatten(1))


TABLE = """\
Net, simulated: 3 layers
layer  type    role         format  scale    elements
conv   Conv2d  weights      e4m3fn  channel        20
               activations  e4m3fn  aps            16
               errors       fp32    none           16
               gradients    fp32    none           20
               accumulate   fp32    none           16
relu   ReLU    activations  e4m3fn  aps            16
               errors       fp32    none           16
fc     Linear  weights      fp16    block:8        27
               activations  e4m3fn  aps             6
               errors       fp32    none            6
               gradients    fp32    none           27
               accumulate   fp32    none            6"""


def described():
    model = Net()
    scale = {"weights": "channel", "activations": "aps"}
    rules = {"fc": {"weights": "fp16", "scale": {"weights": "block:8"}}}
    simulate(model, weights="e4m3fn", activations="e4m3fn", scale=scale, layers=rules)
    return model


def test_table():
    model = described()
    assert "?" in str(describe(model))  # outputs are known when there were some
    assert [row.elements for row in describe(model) if row.layer == "relu"] == [None, None]
    model(torch.ones(2, 1, 4, 4))
    found = describe(model)
    assert str(found) == repr(found) == TABLE
    assert len(found) == len(list(found)) == 12
    assert next(iter(found)) == ("conv", "Conv2d", "weights", "e4m3fn", "channel", 20)
    assert len(describe(model.fc)) == 5
    restore(model)
    assert str(describe(model)) == "Net is not simulated: it computes as it is."
    assert list(describe(model)) == []
    with pytest.raises(TypeError, match=r"takes an nn\.Module, not str"):
        describe("model")


def test_show(capsys, monkeypatch):
    model = described()
    describe(model).show()
    shown = capsys.readouterr().out
    assert "━" in shown
    assert "block:8" in shown
    monkeypatch.setitem(sys.modules, "rich", None)
    describe(model).show()
    assert capsys.readouterr().out == f"{describe(model)}\n"
    restore(model)
    monkeypatch.undo()
    describe(model).show()
    assert "not simulated" in capsys.readouterr().out


def test_tied_weights_are_counted_where_they_are_rounded():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    simulate(model, gradients="e5m2")
    found = {(row.layer, row.role): row.elements for row in describe(model)}
    assert found["0", "gradients"] == found["0", "weights"] == found["1", "weights"] == 28
    assert ("1", "gradients") not in found

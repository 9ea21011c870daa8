"""Recurrent layers in plain matrix products, step by step: what torch computes in one call, so that each product can be
computed otherwise. The functions have the signatures of `torch._VF`, which torch's own modules call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Sequence[Tensor | None]  # w_ih, w_hh, b_ih, b_hh and, of an LSTM with projections, w_hr
States = tuple[Tensor, ...]  # h and, of an LSTM, c
Cell = Callable[[Tensor, States, Weights], States]


def _lstm(x: Tensor, states: States, weights: Weights) -> States:
    h, c = states
    gates = F.linear(x, weights[0], weights[2]) + F.linear(h, weights[1], weights[3])  # type: ignore[arg-type]
    into, forget, new, out = gates.chunk(4, 1)
    c = forget.sigmoid() * c + into.sigmoid() * new.tanh()
    h = out.sigmoid() * c.tanh()
    return (h if len(weights) < 5 else F.linear(h, weights[4])), c  # type: ignore[arg-type]


def _gru(x: Tensor, states: States, weights: Weights) -> States:
    (h,) = states
    of_x = F.linear(x, weights[0], weights[2]).chunk(3, 1)  # type: ignore[arg-type]
    of_h = F.linear(h, weights[1], weights[3]).chunk(3, 1)  # type: ignore[arg-type]
    reset, update = ((a + b).sigmoid() for a, b in zip(of_x[:2], of_h[:2], strict=True))
    new = (of_x[2] + reset * of_h[2]).tanh()
    return ((h - new) * update + new,)


def _plain(nonlinearity: Callable[[Tensor], Tensor]) -> Cell:
    def cell(x: Tensor, states: States, weights: Weights) -> States:
        total = F.linear(x, weights[0], weights[2]) + F.linear(states[0], weights[1], weights[3])  # type: ignore[arg-type]
        return (nonlinearity(total),)

    return cell


def _steps(
    cell: Cell, steps: Sequence[Tensor], states: States, weights: Weights, backwards: bool
) -> tuple[list[Tensor], States]:
    """One direction of one layer: its output at every step, and its last states.

    Of packed sequences a step has as many rows as sequences are that long; the states of the others wait.
    """
    outputs: list[Tensor] = []
    for x in reversed(steps) if backwards else steps:
        rows = x.size(0)
        moved = cell(x, tuple(state[:rows] for state in states), weights)
        outputs.append(moved[0])
        states = tuple(
            new if rows == old.size(0) else torch.cat([new, old[rows:]]) for new, old in zip(moved, states, strict=True)
        )
    return outputs[::-1] if backwards else outputs, states


def _layers(
    cell: Cell,
    steps: Sequence[Tensor],
    states: States,
    flat: Weights,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> tuple[list[Tensor], States]:
    """All layers: the last one's outputs, and the states of every layer and direction, [layers * directions, batch, width]."""
    directions = 2 if bidirectional else 1
    each = len(flat) // (layers * directions)
    finals: list[States] = []
    for layer in range(layers):
        sides = []
        for direction in range(directions):
            number = layer * directions + direction
            own = tuple(state[number] for state in states)
            outputs, final = _steps(cell, steps, own, flat[number * each : (number + 1) * each], direction == 1)
            sides.append(outputs)
            finals.append(final)
        steps = sides[0] if directions == 1 else [torch.cat(pair, -1) for pair in zip(*sides, strict=True)]
        if dropout and training and layer + 1 < layers:
            steps = [F.dropout(x, dropout) for x in steps]
    return list(steps), tuple(torch.stack(parts) for parts in zip(*finals, strict=True))


def _weights(flat: Sequence[Tensor], has_biases: bool, each: int) -> Weights:
    """With a place for every bias: where there are none, `flat` has `each` weights for every layer and direction."""
    if has_biases:
        return flat
    return [w for i in range(0, len(flat), each) for w in (*flat[i : i + 2], None, None, *flat[i + 2 : i + each])]


def _unrolled(cell: Cell, has_memory: bool) -> Callable[..., Any]:
    """A function of the signature that torch gives whole layers: with a batch, or with packed sequences."""

    def whole(input: Tensor, second: Any, third: Any, *rest: Any) -> tuple[Tensor, ...]:
        packed = not isinstance(rest[0], bool)  # then (data, batch sizes, states, weights, has_biases, ...)
        if packed:
            flat, has_biases, layers, dropout, training, bidirectional = rest
            states, batch_sizes, batch_first = third, second.tolist(), False
            steps: Sequence[Tensor] = input.split(batch_sizes)
        else:
            flat, states = third, second
            has_biases, layers, dropout, training, bidirectional, batch_first = rest
            steps = (input.transpose(0, 1) if batch_first else input).unbind()
        states: States = tuple(states) if has_memory else (states,)
        projected = has_memory and states[0].size(-1) != states[1].size(-1)
        weights = _weights(flat, has_biases, 3 if projected else 2)
        outputs, finals = _layers(cell, steps, states, weights, layers, dropout, training, bidirectional)
        output = torch.cat(outputs) if packed else torch.stack(outputs, 1 if batch_first else 0)
        return (output, *finals)

    return whole


def _one_step(cell: Cell, has_memory: bool) -> Callable[..., Any]:
    """A function of the signature that torch gives single cells."""

    def step(input: Tensor, states: Any, *weights: Tensor | None) -> Any:
        moved = cell(input, tuple(states) if has_memory else (states,), weights)
        return moved if has_memory else moved[0]

    return step


lstm, lstm_cell = _unrolled(_lstm, True), _one_step(_lstm, True)
gru, gru_cell = _unrolled(_gru, False), _one_step(_gru, False)
rnn_tanh, rnn_tanh_cell = _unrolled(_plain(torch.tanh), False), _one_step(_plain(torch.tanh), False)
rnn_relu, rnn_relu_cell = _unrolled(_plain(torch.relu), False), _one_step(_plain(torch.relu), False)

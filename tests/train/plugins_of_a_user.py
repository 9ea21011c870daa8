"""Plugins that go wrong, as users' own code does; tests name them by `module:function`."""

import torch
from torch import nn


def recipe():
    raise KeyError("no such thing")


def recipe_of_itself():
    from lowp.training.reading import read_recipe

    return read_recipe("train.plugins_of_a_user:recipe_of_itself")


def model(shape, classes):
    raise RuntimeError("cannot be built\nand a second line")


def wrong_inside(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3, classes))


class Answers(nn.Module):
    """A model that returns something else than a tensor of logits."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.linear = nn.Linear(196, 10)
        self.answer = answer

    def forward(self, x):
        return self.answer(self.linear(x.flatten(1)))


def a_dictionary(shape, classes):
    return Answers(lambda logits: {"out": logits})


def a_pair(shape, classes):
    return Answers(lambda logits: (logits, logits))


def too_few_classes(shape, classes):
    return Answers(lambda logits: logits[:, :3])


def one_number(shape, classes):
    return Answers(lambda logits: logits.sum())


def raises_in_forward(shape, classes):
    return Answers(lambda logits: logits[:, 99])


def nothing_to_train(shape, classes):
    return nn.Flatten()


class Samples:
    def __init__(self, sick: int, target: int = 1) -> None:
        self.sick, self.target = sick, target

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int):
        if index == self.sick:
            raise OSError("the disk is gone")
        return torch.zeros(1, 4, 4), self.target


def data():
    raise RuntimeError("no data today")


def sick_sample(sick: int = 3):
    return Samples(sick), Samples(99), 3


def sick_first_sample():
    return sick_sample(0)


def target_beyond_the_classes():
    return Samples(99, target=7), Samples(99), 3


def no_number_of_classes():
    return Samples(99), Samples(99), "three"


def transform(inputs, targets, generator):
    return inputs[:, 99], targets


def choose(model, inputs, targets):
    raise ZeroDivisionError("by nothing")


def choose_nonsense(model, inputs, targets):
    return "all of them"


def choose_nothing(model, inputs, targets):
    return None

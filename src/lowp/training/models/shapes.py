"""What a model reads from the shape of one sample: (channels, height, width) of an image, (length,) of a text."""

IMAGENET_PIXELS = 128
"""From this size on, images enter by a stem that was made for ImageNet."""


def image_sides(shape: tuple[int, ...], model: str, smallest: int = 1) -> tuple[int, int, int]:
    """Channels, height and width; `smallest` is the side that the model's pooling needs."""
    if len(shape) != 3:
        raise ValueError(f"{model} takes images, whose shape is (channels, height, width), not {tuple(shape)}")
    channels, height, width = shape
    if min(height, width) < smallest:
        raise ValueError(f"{model} takes images of {smallest} x {smallest} pixels or more, not {height} x {width}")
    return channels, height, width


def text_length(shape: tuple[int, ...], model: str) -> int:
    if len(shape) != 1:
        raise ValueError(f"{model} takes texts, whose shape is (length,), not {tuple(shape)}")
    return shape[0]

"""The kinds of layers whose example gradients can be captured."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tdasearch.layers.layer import Layer, Part, Watch
from tdasearch.layers.linear import linear

KINDS: dict[str, Callable[[str, nn.Module], Layer | None]] = {
    "linear": linear,
}
"""How each kind is recognised; ``kind:norm`` in a pattern chooses by it."""


def layer_of(name: str, module: nn.Module) -> Layer | None:
    """Describe a module whose example gradients can be captured.

    Args:
        name: Its name.
        module: The module itself; its children are not looked at.

    Returns:
        Its layer, or None.
    """
    found = kind_of(name, module)
    return None if found is None else found[1]


def kind_of(name: str, module: nn.Module) -> tuple[str, Layer] | None:
    """Return the kind and the layer of a module, or None if it is of no known kind."""
    for kind, recognise in KINDS.items():
        layer = recognise(name, module)
        if layer is not None:
            return kind, layer
    return None


__all__ = ["KINDS", "Layer", "Part", "Watch", "kind_of", "layer_of"]

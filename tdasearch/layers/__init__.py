"""The kinds of layers whose example gradients can be captured."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tdasearch.layers.adapter import adapter
from tdasearch.layers.convolution import convolution
from tdasearch.layers.embedding import embedding
from tdasearch.layers.experts import experts
from tdasearch.layers.layer import Layer, Part, Watch
from tdasearch.layers.linear import linear
from tdasearch.layers.norm import norm
from tdasearch.layers.recomputed import other

KINDS: dict[str, Callable[[str, nn.Module], Layer | None]] = {
    "linear": linear,
    "convolution": convolution,
    "embedding": embedding,
    "norm": norm,
    "experts": experts,
    "adapter": adapter,
    "other": other,
}
"""How each kind is recognised, in this order."""


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

"""Which modules an index covers: by default every linear map inside the transformer blocks, not the embedding, not the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from tdasearch.errors import UsageError
from tdasearch.layers import KINDS, Layer, Part, kind_of
from tdasearch.layers.adapter import adapter_modules
from tdasearch.watch import choose_layers

DEFAULT_KINDS = ("linear", "convolution", "experts", "adapter")
"""Kinds that are covered unless others are asked for: the maps, not the vectors and tables."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The chosen modules and how much of the model they are.

    Attributes:
        layers: The chosen modules, in the model's order.
        parts: Their matrices of gradients; weights that several modules share are there once.
        num_parameters: Parameters of the whole model, tied ones counted once.
    """

    layers: tuple[Layer, ...]
    parts: tuple[Part, ...]
    num_parameters: int

    @property
    def names(self) -> list[str]:
        """Names of the chosen modules."""
        return [layer.name for layer in self.layers]

    @property
    def num_covered_parameters(self) -> int:
        """Parameters of the chosen modules."""
        return sum(part.num_parameters for part in self.parts)

    @property
    def share(self) -> float:
        """Share of all parameters that the chosen modules hold, 0 to 1."""
        return self.num_covered_parameters / self.num_parameters


def choose_modules(
    model: nn.Module, *, patterns: Sequence[str] = (), kinds: Sequence[str] = (), blocks: str | None = None
) -> Coverage:
    """Choose modules by name, kind and block.

    A block is an element of an ``nn.ModuleList`` that holds linear maps; block numbers are positions in the outermost such list.

    Args:
        model: The model.
        patterns: Shell patterns of module names (``*.mlp.*``); a module is kept if one matches, wherever it is. None given: all
            modules inside the blocks, or all of a model that has no blocks; of a model with peft adapters, only those.
        kinds: Kinds of layers, of ``layers.KINDS``; none given: ``DEFAULT_KINDS``.
        blocks: ``"22:30"`` keeps blocks 22 to 29, ``"-8:"`` the last eight, ``"3"`` one. None: all.

    Returns:
        The chosen modules, and their share of the parameters.

    Raises:
        UsageError: Nothing was chosen, ``blocks`` is no range, or a kind is unknown.
    """
    kinds = kinds or DEFAULT_KINDS
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise UsageError(f"kinds: expected some of {', '.join(KINDS)}, found {', '.join(unknown)}")
    inside = _blocks_of(model)
    num_blocks = 1 + max(inside.values(), default=-1)
    kept = _block_numbers(blocks, num_blocks)
    candidates = {
        name: found[1]
        for name, module in model.named_modules()
        if (found := kind_of(name, module)) is not None and found[0] in kinds
    }
    adapters = adapter_modules(model)
    if adapters and not patterns:
        candidates = {name: layer for name, layer in candidates.items() if name in adapters}
    if blocks is not None or (not patterns and num_blocks):
        candidates = {name: layer for name, layer in candidates.items() if inside.get(name) in kept}
    layers = [
        layer for name, layer in candidates.items() if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if not layers:
        raise UsageError(
            f"no module was chosen by patterns {list(patterns)}, kinds {list(kinds)} and blocks {blocks!r}; the model has "
            f"{num_blocks} blocks and {len(candidates)} such modules, such as {', '.join(list(candidates)[:4]) or '(none)'}"
        )
    chosen = choose_layers(model, [layer.name for layer in layers])
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Coverage(tuple(chosen.layers.values()), tuple(chosen.parts.values()), num_parameters)


def _blocks_of(model: nn.Module) -> dict[str, int]:
    """Map the name of each module inside a block to the block's number, by the outermost list that holds it."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    inside = {}
    for name, _ in model.named_modules():
        for prefix in lists:  # named_modules goes outside in, so the first match is the outermost list
            if name.startswith(prefix + "."):
                inside[name] = int(name[len(prefix) + 1 :].split(".", 1)[0])
                break
    return inside


def _block_numbers(blocks: str | None, num_blocks: int) -> set[int]:
    if blocks is None:
        return set(range(num_blocks))
    try:
        parts = [int(part) if part else None for part in blocks.split(":")]
    except ValueError:
        parts = []
    if len(parts) == 1 and parts[0] is not None:
        return {parts[0] % num_blocks} if -num_blocks <= parts[0] < num_blocks else set()
    if len(parts) != 2:
        raise UsageError(f"blocks: expected a range such as 22:30, -8: or 3, found {blocks!r}")
    return set(range(num_blocks)[slice(*parts)])

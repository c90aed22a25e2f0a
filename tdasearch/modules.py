"""Which modules an index covers: by default every linear map inside the transformer blocks, not the embedding, not the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from tdasearch.capture import LinearMap, linear_map
from tdasearch.errors import UsageError


@dataclass(frozen=True, slots=True)
class Coverage:
    """The chosen modules and how much of the model they are.

    Attributes:
        maps: The chosen linear maps, in the model's order.
        num_parameters: Parameters of the whole model, tied ones counted once.
    """

    maps: tuple[LinearMap, ...]
    num_parameters: int

    @property
    def names(self) -> list[str]:
        """Names of the chosen modules."""
        return [linear.name for linear in self.maps]

    @property
    def num_covered_parameters(self) -> int:
        """Parameters of the chosen modules."""
        return sum(linear.num_parameters for linear in self.maps)

    @property
    def share(self) -> float:
        """Share of all parameters that the chosen modules hold, 0 to 1."""
        return self.num_covered_parameters / self.num_parameters


def choose_modules(model: nn.Module, *, patterns: Sequence[str] = (), blocks: str | None = None) -> Coverage:
    """Choose the linear maps of the transformer blocks.

    A block is an element of an ``nn.ModuleList`` that holds linear maps; block numbers are positions in the outermost such list.

    Args:
        model: The model.
        patterns: Shell patterns of module names (``*.mlp.*``); a module is kept if one matches. None given: all.
        blocks: ``"22:30"`` keeps blocks 22 to 29, ``"-8:"`` the last eight, ``"3"`` one. None: all.

    Returns:
        The chosen modules, and their share of the parameters.

    Raises:
        UsageError: Nothing was chosen, or ``blocks`` is no range.
    """
    inside = _blocks_of(model)
    num_blocks = 1 + max(inside.values(), default=-1)
    kept = _block_numbers(blocks, num_blocks)
    maps = []
    for name, module in model.named_modules():
        linear = linear_map(name, module)
        if linear is None or name not in inside or inside[name] not in kept:
            continue
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns):
            maps.append(linear)
    if not maps:
        available = [name for name, module in model.named_modules() if name in inside and linear_map(name, module)]
        raise UsageError(
            f"no module was chosen by patterns {list(patterns)} and blocks {blocks!r}; the model has {num_blocks} blocks "
            f"and {len(available)} linear maps in them, such as {', '.join(available[:4]) or '(none)'}"
        )
    return Coverage(tuple(maps), sum(parameter.numel() for parameter in model.parameters()))


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

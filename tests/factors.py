"""Random gradients in every form, for the tests of what is done with them."""

from __future__ import annotations

import torch

from tdasearch.gradients import Dense, Grouped, Lookup, ModuleGradient, Outer

FORMS = ("outer", "grouped", "shared", "scale", "lookup", "dense")


def random_gradient(
    form: str, *, examples: int = 3, positions: int = 5, seed: int = 0, out_dim: int = 6, in_dim: int = 4, dtype=torch.float64
) -> ModuleGradient:
    """A gradient of [out_dim, in_dim] (``scale``: in_dim is 1) with padding in the last example.

    ``grouped`` is made of two groups with activations of their own, ``shared`` of two groups that read the same ones, ``scale``
    of as many groups as outputs, as in a norm.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    is_position = torch.ones(examples, positions, dtype=torch.bool)
    is_position[-1, positions // 2 :] = False
    outputs = normal(examples, positions, out_dim) * is_position[:, :, None]
    match form:
        case "outer":
            return Outer(normal(examples, positions, in_dim), outputs, is_position)
        case "grouped":
            return Grouped(normal(examples, positions, 2, in_dim), outputs.unflatten(2, (2, -1)), is_position)
        case "shared":
            return Grouped(normal(examples, 1, 1, in_dim), outputs.unflatten(2, (2, -1)), is_position)
        case "scale":
            return Grouped(normal(examples, positions, out_dim, 1), outputs.unflatten(2, (out_dim, 1)), is_position)
        case "lookup":
            indices = torch.randint(0, in_dim, (examples, positions), generator=generator)
            return Lookup(indices, outputs, in_dim, is_position)
        case "dense":
            return Dense(normal(examples, out_dim, in_dim))
    raise AssertionError(form)

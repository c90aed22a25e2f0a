"""Any model and any loss: what tdasearch has to be told of a model that is no causal language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Losses = Callable[[nn.Module, Any], Tensor]
"""Runs the model on one batch; losses_N [N], one an example, each of which depends on that example only."""


@dataclass(frozen=True, slots=True)
class Task:
    """How examples become a batch, and a batch becomes losses.

        Task(
            collate=lambda rows: default_collate(rows),
            losses=lambda model, batch: F.cross_entropy(model(batch["image"]), batch["label"], reduction="none"),
        )

    Attributes:
        collate: From a list of N examples, of any type, to what ``losses`` takes, on the model's device.
        losses: The training loss of each example, summed over whatever the example consists of, not averaged.
        fisher_losses: The same with targets drawn from the model's own distribution, for the true Fisher; None: the data's own
            targets are used (the empirical Fisher).
    """

    collate: Callable[[Sequence[Any]], Any]
    losses: Losses
    fisher_losses: Losses | None = None

"""Capture in ``transformers.Trainer``, and in the trainers made of it (TRL's ``SFTTrainer``), as a callback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tdasearch.errors import CaptureError
from tdasearch.gradients import ModuleGradient
from tdasearch.modules import DEFAULT_KINDS
from tdasearch.training import LossScale, SegmentIds, TrainingBatch, TrainingCapture, capture_training


class CaptureCallback(TrainerCallback):
    """Watches the training of a ``Trainer``: ``Trainer(..., callbacks=[CaptureCallback(on_batch)])``.

    The arguments are those of ``capture_training``. In a trainer of several processes each one captures its own examples.

    Args:
        on_batch: Called after each micro-batch.
        modules: Names or shell patterns of modules.
        kinds: Kinds of layers.
        blocks: Range of blocks.
        loss_scale: What an example's summed loss is multiplied by; measured by default, whatever the trainer averages over.
        segments: How packed rows are told apart.
        transform: Applied to each part's gradients as soon as they are there.

    Attributes:
        capture: Of the training that runs or ran last; None before.
        state: The trainer's own; ``state.global_step`` counts the steps that were finished before the batch.
    """

    def __init__(
        self,
        on_batch: Callable[[TrainingBatch], None],
        *,
        modules: Sequence[str] = (),
        kinds: Sequence[str] = DEFAULT_KINDS,
        blocks: str | None = None,
        loss_scale: LossScale = "auto",
        segments: SegmentIds = "auto",
        transform: Callable[[str, ModuleGradient], ModuleGradient] | None = None,
    ) -> None:
        self._on_batch = on_batch
        self._modules, self._kinds, self._blocks = modules, kinds, blocks
        self._loss_scale: LossScale = loss_scale
        self._segments: SegmentIds = segments
        self._transform = transform
        self.capture: TrainingCapture | None = None
        self.state: TrainerState | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Begin to watch the model.

        Args:
            args: The trainer's settings.
            state: Its state.
            control: Its control, left alone.
            others: What else it tells its callbacks, with the model that it trains.

        Raises:
            CaptureError: The trainer compiles its model.
        """
        if args.torch_compile:
            raise CaptureError("the trainer compiles its model, which hides its modules' runs: expected torch_compile=False")
        self.close()  # of a training that an error ended
        self.state = state
        self.capture = capture_training(
            others["model"],
            self._on_batch,
            modules=self._modules,
            kinds=self._kinds,
            blocks=self._blocks,
            loss_scale=self._loss_scale,
            segments=self._segments,
            transform=self._transform,
        )
        self.capture.__enter__()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Leave the model alone again."""
        if self.capture is not None:
            self.capture.__exit__(None, None, None)

    def close(self) -> None:
        """Leave the model alone after a training that an error ended: a trainer does not tell its callbacks."""
        if self.capture is not None and self.capture.is_watching:
            self.capture.__exit__(CaptureError, None, None)

"""Capture inside a training loop that someone else wrote: each example's gradients, while the weights are trained.

The loop runs as it is; hooks watch it. After each backward pass a ``TrainingBatch`` is handed over: every example's gradients of
its *summed* loss, whatever the loop made of it: the factor that it was multiplied by is measured (``loss_scale``). Evaluation
under ``no_grad`` is not seen. The weights after any number of steps are bit for bit those of the loop without a capture.

Legend: N examples, T positions.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tdasearch.calls import Inputs, count_examples, first_matrix, named_inputs, named_outputs, receive_gradient
from tdasearch.errors import CaptureError, UsageError
from tdasearch.gradients import Dense, Grouped, Lookup, ModuleGradient, Outer, scaled
from tdasearch.layers import Layer
from tdasearch.loss_scale import scale_of_log_probabilities, scale_of_logits
from tdasearch.modules import DEFAULT_KINDS, choose_modules
from tdasearch.segments import Segments, find_segments, segments_of
from tdasearch.watch import Pass, choose_layers, refuse_compiled

SegmentIds = Literal["auto"] | Callable[[Inputs], Tensor] | None
LossScale = Literal["auto"] | float | Callable[[Inputs], float | Tensor]


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """One pass of a training loop over a (micro-)batch.

    Attributes:
        number: From 0, counting every pass that was differentiated, those with gradients that are not finite included.
        gradients: By part; each example's gradients of its summed loss.
        num_examples: N.
        scale_N: [N] float64, what the loop multiplied each example's summed loss by; divided out of the gradients.
        inputs: What the model was called with.
        segments: Where the examples lie in packed rows; None: each is a row.
    """

    number: int
    gradients: Mapping[str, ModuleGradient]
    num_examples: int
    scale_N: Tensor
    inputs: Inputs
    segments: Segments | None = None


class _TrainingPass:
    """A pass that is under way, with what was seen of its loss."""

    def __init__(self, inputs: Inputs, num_rows: int, segments: Segments | None) -> None:
        self.inputs = inputs
        self.num_rows = num_rows
        self.segments = segments
        self.num_examples = num_rows if segments is None else len(segments)
        self.scale_N: Tensor | None = None
        self.gradients: dict[str, ModuleGradient] = {}
        self.is_finite: list[Tensor] = []
        self.finished = False
        self.watched: Pass


class TrainingCapture:
    """Context in which a training loop is watched; see ``capture_training``.

    Attributes:
        num_batches: Passes that were differentiated so far.
        is_watching: Whether the context is entered.
        nonfinite: Numbers of those whose gradients were not finite (an overflow that the loss scaler will skip).
    """

    def __init__(
        self,
        model: nn.Module,
        on_batch: Callable[[TrainingBatch], None],
        names: Sequence[str],
        loss_scale: LossScale,
        segments: SegmentIds,
        transform: Callable[[str, ModuleGradient], ModuleGradient],
    ) -> None:
        refuse_compiled(model)
        self.model = model
        self.num_batches = 0
        self.nonfinite: list[int] = []
        self._on_batch = on_batch
        self._chosen = choose_layers(model, names)
        self._loss_scale = loss_scale
        self._segments = segments
        self._transform = transform
        self._attached = ExitStack()
        self.is_watching = False
        self._current: _TrainingPass | None = None  # its forward pass runs
        self._started: list[_TrainingPass] = []  # their backward pass runs

    @property
    def layers(self) -> list[Layer]:
        """The watched layers; their ``parameter_gradients`` bring gradients into the shape of the parameters."""
        return list(self._chosen.layers.values())

    def __enter__(self) -> TrainingCapture:
        _refuse_compiled_around(self.model)
        self.is_watching = True
        self._attached = self._chosen.attach(self._watch)
        self._attached.enter_context(self.model.register_forward_pre_hook(self._before, with_kwargs=True))
        self._attached.enter_context(self.model.register_forward_hook(self._after, always_call=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._attached.close()
        self.is_watching = False
        self._current, self._started = None, []
        if kind is None and not self.num_batches:
            warnings.warn(
                "nothing was captured: the model that was given ran no forward pass that was differentiated inside the context; "
                "give the model that the loop calls, and put the loop's backward() inside",
                stacklevel=2,
            )

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._started.clear()  # of a backward pass that an error ended
        if not torch.is_grad_enabled():
            self._current = None
            return
        inputs = named_inputs(module, args, kwargs)
        num_rows = count_examples(inputs)
        if callable(self._segments):
            segments: Segments | None = segments_of(self._segments(inputs))
        else:
            segments = find_segments(inputs, num_rows) if self._segments == "auto" else None
            if segments is not None:
                _refuse_cache(module, inputs)
        batch = _TrainingPass(inputs, num_rows, segments)
        batch.watched = Pass(self._chosen, partial(self._consume, batch))
        batch.watched.num_examples, batch.watched.num_rows = batch.num_examples, num_rows
        batch.watched.split = None if segments is None else segments.split
        self._current = batch

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        batch, self._current = self._current, None
        if batch is None or output is None:
            return
        named = named_outputs(output)
        logits_name = next((name for name in ("logits", "log_probs") if name in named), first_matrix(named))
        for name, tensor in named.items():
            if not tensor.requires_grad:
                continue
            if name == logits_name and self._loss_scale == "auto":
                values = tensor.detach()
                receive_gradient(tensor, partial(self._on_logits, batch, values, is_log=name == "log_probs"))
            elif tensor.dim() == 0 and name.endswith("loss") and name != "loss" and self._loss_scale == "auto":
                tensor.register_hook(partial(_refuse_auxiliary, name))
            tensor.register_hook(partial(self._begin, batch))

    def _watch(self, layer: Layer, kept: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if self._current is not None:
            return self._current.watched.watch(layer, kept, output)
        if len(self._started) == 1:  # gradient checkpointing runs it again
            return self._started[0].watched.watch(layer, kept, output, recomputed=True)
        if self._started:
            raise CaptureError(
                f"module {layer.name!r} is run again in the backward pass of {len(self._started)} forward passes, which cannot "
                "be told apart; call backward() after each, or use checkpointing with use_reentrant=False"
            )
        raise CaptureError(
            f"module {layer.name!r} ran outside of the forward pass of the model that was given; give the outermost module that "
            "the loop calls, not under torch.compile"
        )

    def _begin(self, batch: _TrainingPass, *_: Tensor) -> None:
        """A gradient reached the pass."""
        if not self.is_watching:
            raise CaptureError("a pass that was begun in a training capture was differentiated after it: put backward() inside")
        if batch.finished:
            raise CaptureError(
                "a pass was differentiated twice (retain_graph), so its gradients are no sum of losses; use one loss"
            )
        if batch not in self._started:
            self._started.append(batch)
            if len(self._started) == 1:  # torch's distributed modules learn of the end of a backward pass in the same way
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _consume(self, batch: _TrainingPass, name: str, gradient: ModuleGradient) -> None:
        """Take in a part's gradients, still of the scaled loss."""
        if not batch.finished:  # zeros of experts without a token come at the end
            self._begin(batch)
        wide = _widened(gradient)
        batch.is_finite.append(_values(wide).isfinite().all())
        batch.gradients[name] = self._transform(name, wide)

    def _on_logits(self, batch: _TrainingPass, values: Tensor, gradient: Tensor, *, is_log: bool) -> None:
        self._begin(batch)
        batch.is_finite.append(gradient.isfinite().all())
        if not batch.is_finite[-1]:
            return
        num_positions = gradient.numel() if is_log else gradient.numel() // gradient.shape[-1]
        example_R = _example_of_positions(batch, num_positions).to(gradient.device)
        if is_log:
            batch.scale_N = scale_of_log_probabilities(gradient, example_R, batch.num_examples)
        else:
            batch.scale_N = scale_of_logits(values, gradient, example_R, batch.num_examples)

    def _finish(self) -> None:
        """Deliver the passes that this backward pass went through; run by autograd at its end."""
        batches, self._started = self._started, []
        for batch in batches:
            batch.finished = True
            number, self.num_batches = self.num_batches, self.num_batches + 1
            batch.watched.raise_if_missing(
                batch.watched.received,
                "got no gradient",
                "the loss does not depend on it, its weight is used elsewhere, or the loop compiled it",
            )
            batch.watched.finish()
            if not torch.stack([flag.cpu() for flag in batch.is_finite]).all():
                self._report_nonfinite(number)
                continue
            scale_N = self._scale(batch)
            gradients = {
                name: scaled(gradient, 1 / scale_N.to(_values(gradient).device)) for name, gradient in batch.gradients.items()
            }
            batch.gradients = {}
            with torch.no_grad():
                self._on_batch(TrainingBatch(number, gradients, batch.num_examples, scale_N, batch.inputs, batch.segments))

    def _scale(self, batch: _TrainingPass) -> Tensor:
        found: Any = batch.scale_N
        if self._loss_scale != "auto":
            found = self._loss_scale(batch.inputs) if callable(self._loss_scale) else self._loss_scale
        if found is None:
            raise CaptureError(
                "no gradient reached the model's logits, so what the loss was multiplied by cannot be measured; expected an "
                "output with logits (or log_probs) of which the loss is made; give loss_scale"
            )
        scale_N = torch.as_tensor(found, dtype=torch.float64).expand(batch.num_examples)
        if not (scale_N.isfinite() & (scale_N != 0)).all():
            raise CaptureError(f"loss_scale: expected finite numbers other than 0, found {scale_N.tolist()}")
        return scale_N

    def _report_nonfinite(self, number: int) -> None:
        if not self.nonfinite:
            warnings.warn(
                f"batch {number} of the training loop had gradients that are not finite (an fp16 overflow, which the loss scaler "
                "skips): it is not delivered. TrainingCapture.nonfinite lists all such batches",
                stacklevel=2,
            )
        self.nonfinite.append(number)


def capture_training(
    model: nn.Module,
    on_batch: Callable[[TrainingBatch], None],
    *,
    modules: Sequence[str] = (),
    kinds: Sequence[str] = DEFAULT_KINDS,
    blocks: str | None = None,
    loss_scale: LossScale = "auto",
    segments: SegmentIds = "auto",
    transform: Callable[[str, ModuleGradient], ModuleGradient] | None = None,
) -> TrainingCapture:
    """Watch a training loop, which runs inside the context that is returned.

    The examples of a batch are its rows, or the documents packed in them; the loss of one must depend on no other (no batch
    statistics, no contrastive loss). This is not checked, as it would take another pass. Examples without a target have gradient
    zero.

    Args:
        model: What the loop calls; inside ``DistributedDataParallel``, the model that is wrapped. Not under ``torch.compile``.
        on_batch: Called at the end of each backward pass, under ``no_grad``. A batch with gradients that are not finite is not
            delivered, but reported.
        modules: Names or shell patterns of modules, as in ``choose_modules``. None given: those inside the blocks.
        kinds: Kinds of layers.
        blocks: Range of blocks, such as ``"-8:"``.
        loss_scale: What the loop multiplies an example's summed loss by. ``"auto"`` measures it for cross entropies, including a
            gradient scaler's factor; otherwise the number, or a function of the model's inputs that returns it or one an example.
        segments: How packed rows are told apart, each document being an example. ``"auto"``: by ``find_segments``; a function of
            the model's inputs that returns the number of each position's document [N, T], -1 for none; None: rows are examples.
        transform: Applied to each part's gradients as soon as they are there, so that a batch's need not be held in full; linear
            in each example's gradient.

    Returns:
        The context. Where experts are watched they run one after another, so that weights equal those of the loop alone only up
        to rounding.

    Raises:
        UsageError: Nothing was chosen, or an argument is of no known kind.
        CaptureError: The model is compiled, or modules share a part of their parameters.
    """  # noqa: DOC502
    if not (loss_scale == "auto" or callable(loss_scale) or isinstance(loss_scale, int | float)):
        raise UsageError(f"loss_scale: expected 'auto', a number or a function of the model's inputs, found {loss_scale!r}")
    if not (segments is None or segments == "auto" or callable(segments)):
        raise UsageError(f"segments: expected 'auto', None or a function of the model's inputs, found {segments!r}")
    names = choose_modules(model, patterns=modules, kinds=kinds, blocks=blocks).names
    return TrainingCapture(model, on_batch, names, loss_scale, segments, transform or _unchanged)


def _refuse_compiled_around(model: nn.Module) -> None:
    """Find a ``torch.compile(model)`` that the loop may call in the model's place; the model itself does not know of it."""
    if "torch._dynamo" in sys.modules and any(
        isinstance(one, dict) and one.get("_orig_mod") is model for one in gc.get_referrers(model)
    ):
        raise CaptureError(
            "the model was wrapped by torch.compile, which hides its modules' runs: train it uncompiled, and delete the wrapper"
        )


def _unchanged(name: str, gradient: ModuleGradient) -> ModuleGradient:
    return gradient


def _values(gradient: ModuleGradient) -> Tensor:
    match gradient:
        case Dense():
            return gradient.gradient_NOI
        case Grouped():
            return gradient.output_gradients_NTGO
        case Outer() | Lookup():
            return gradient.output_gradients_NTO


def _widened(gradient: ModuleGradient) -> ModuleGradient:
    """Half-precision gradients in float32: divided by their scale they may leave the range of fp16."""
    values = _values(gradient)
    wide = torch.promote_types(values.dtype, torch.float32)
    if values.dtype == wide:
        return gradient
    match gradient:
        case Dense():
            return Dense(values.to(wide))
        case Grouped():
            return Grouped(gradient.activations_NTGI, values.to(wide), gradient.is_position_NT)
        case Outer():
            return Outer(gradient.activations_NTI, values.to(wide), gradient.is_position_NT)
        case Lookup():
            return Lookup(gradient.indices_NT, values.to(wide), gradient.num_rows, gradient.is_position_NT)


def _refuse_cache(model: nn.Module, inputs: Inputs) -> None:
    """Raise where documents are not kept apart: transformers does only where it makes no cache, but by default it makes one."""
    config: Any = getattr(model, "config", None)
    uses_cache = inputs.get("use_cache")
    if uses_cache is None:
        uses_cache = getattr(config, "use_cache", False)
    if model.training and getattr(model, "is_gradient_checkpointing", False):
        uses_cache = False  # transformers makes none then
    if uses_cache and "flash" not in str(getattr(config, "_attn_implementation", "")):
        raise CaptureError(
            "packed documents see each other in a pass that makes a cache, so their gradients cannot be told apart: call the "
            "model with use_cache=False, or say with segments=... that its attention keeps them apart"
        )


def _example_of_positions(batch: _TrainingPass, num_positions: int) -> Tensor:
    """The example of each position of the logits, which may leave out the last one of a row."""
    a_row = num_positions // batch.num_rows
    expected = (a_row,) if batch.segments is None else (batch.segments.num_positions, batch.segments.num_positions - 1)
    if num_positions % batch.num_rows or a_row not in expected:
        raise CaptureError(
            f"expected as many positions of logits in each of {batch.num_rows} rows, all of them in packed rows, found "
            f"{num_positions} in all; give loss_scale"
        )
    if batch.segments is None:
        return torch.arange(batch.num_rows).repeat_interleave(a_row)
    return batch.segments.of_positions(batch.num_rows)[:, :a_row].flatten()


def _refuse_auxiliary(name: str, gradient: Tensor) -> None:
    if bool(gradient != 0):
        raise CaptureError(
            f"the training loss depends on the model's {name} besides its logits, so gradients are no multiple of those of the "
            "summed cross entropy; switch it off, or give loss_scale to take them as they are"
        )

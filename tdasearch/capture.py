"""Capture: every example's gradient of the chosen modules, in factored form, with every weight frozen.

In comes a causal or any other ``nn.Module``, the names of its modules, and a function that runs it and returns one loss an
example. Out go, module by module while the backward pass runs, each example's gradients (``gradients.ModuleGradient``). No weight
gradient is ever computed, and the graph begins at the first captured module. Knows nothing of text, curvature or storage.

Legend: N examples, T positions, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tdasearch.errors import CaptureError
from tdasearch.gradients import ModuleGradient
from tdasearch.layers import Layer
from tdasearch.watch import Consume, Pass, choose_layers, refuse_compiled

_kept_apart: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""The modules of each model that were seen to keep examples apart: this is checked once, not in each capture."""


class Capture:
    """Context in which a model is frozen and the chosen modules are watched; the model is handed back as it came.

    Args:
        model: The model. Its modes, ``requires_grad`` flags, hooks and the random state are restored on exit.
        names: Modules to capture; each must run in every pass. The uses of one that runs several times, or of modules that share
            their weight, are summed.
        check: Check on a model's first batch, with one more backward pass, that it keeps its examples apart.

    Raises:
        CaptureError: A name is missing or its module is of no known kind, or the model is compiled.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], *, check: bool = True) -> None:
        refuse_compiled(model)
        self.model = model
        self._chosen = choose_layers(model, names)
        self.parts = self._chosen.parts
        self._unchecked = check and not _kept_apart.get(model, set()).issuperset(names)
        self._attached = ExitStack()
        self._entered = False
        self._pass = Pass(self._chosen, _nobody)

    def __enter__(self) -> Capture:
        self._requires_grad = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        self._training = [(module, module.training) for module in self.model.modules()]
        self._rng = torch.get_rng_state()
        self._cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        for parameter, _ in self._requires_grad:
            parameter.requires_grad_(False)
        self.model.eval()
        self._attached = self._chosen.attach(self._watch)
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._attached.close()
        self._entered = False
        self._pass = Pass(self._chosen, _nobody)
        for parameter, flag in self._requires_grad:
            parameter.requires_grad_(flag)
        for module, flag in self._training:
            module.training = flag
        torch.set_rng_state(self._rng)
        if self._cuda_rng is not None:
            torch.cuda.set_rng_state_all(self._cuda_rng)

    def backward(self, losses: Callable[[], Tensor], consume: Consume, *, is_token_NT: Tensor | None = None) -> Tensor:
        """Run the model once forward and once backward, and hand each part's gradients to ``consume``.

        Args:
            losses: Runs the model on one batch and returns losses_N, one an example; example n's loss depends on example n only.
            consume: Receives the gradients, last module first. Positions beyond an example's end have zero output gradients.
            is_token_NT: [N, T] False at padding, for the masks of covariances; None: positions with a gradient.

        Returns:
            losses_N, detached.

        Raises:
            CaptureError: A module did not run, no gradient reached it, or examples are not kept apart.
        """
        if not self._entered:
            raise CaptureError("expected the capture to be entered (with Capture(...) as capture), found it closed")
        batch = self._pass = Pass(self._chosen, consume)
        with torch.enable_grad():
            losses_N = losses()
            if losses_N.dim() != 1:
                raise CaptureError(f"expected one loss an example, losses_N [N], found a tensor of shape {list(losses_N.shape)}")
            batch.raise_if_missing(batch.used, "never ran forward", "choose modules that this model uses")
            batch.num_examples, batch.is_token_NT = len(losses_N), is_token_NT
            if losses_N.requires_grad:
                if self._unchecked and batch.num_examples > 1:
                    self._check_apart(losses_N)
                losses_N.sum().backward()
        batch.raise_if_missing(batch.received, "got no gradient", "the loss does not depend on it: choose other modules")
        batch.finish()
        return losses_N.detach()

    def _watch(self, layer: Layer, kept: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return self._pass.watch(layer, kept, output)

    def _check_apart(self, losses_N: Tensor) -> None:
        self._pass.inspect = _raise_unless_apart
        losses_N[0].backward(retain_graph=True)
        self._pass.inspect = None
        self._unchecked = False
        _kept_apart.setdefault(self.model, set()).update(self._chosen.layers)


def _nobody(name: str, gradient: ModuleGradient) -> None:
    raise CaptureError(f"module {name!r} got a gradient outside of Capture.backward; run the model inside it")


def _raise_unless_apart(name: str, gradient: ModuleGradient) -> None:
    """The gradient of example 0's loss must lie in row 0 alone."""
    from_others = getattr(gradient, "output_gradients_NTO", getattr(gradient, "output_gradients_NTGO", None))
    if from_others is None:
        from_others = gradient.dense()
    if from_others[1:].count_nonzero() and torch.isfinite(from_others).all():
        raise CaptureError(
            f"module {name!r}: expected the loss of an example to depend on that example only, found that another one's rows get "
            "a gradient from it: the batch is not the first dimension (batch_first=False, routed tokens), or the model mixes "
            "its examples (a loss averaged over the batch, batch statistics); run examples one by one, or leave the module out"
        )

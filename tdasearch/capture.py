"""Capture: every example's gradient of the chosen modules, in factored form, with every weight frozen.

In comes a causal or any other ``nn.Module``, the names of its modules, and a function that runs it and returns one loss an
example. Out go, module by module while the backward pass runs, each example's gradients (``gradients.ModuleGradient``). No weight
gradient is ever computed, and the graph begins at the first captured module. Knows nothing of text, curvature or storage.

Legend: N examples, T positions, I inputs, O outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tdasearch.errors import CaptureError
from tdasearch.gradients import ModuleGradient, Outer, total, transposed
from tdasearch.layers import Layer, Part, layer_of

Consume = Callable[[str, ModuleGradient], None]
"""Called with a part's name and its gradients, once a part and pass."""

_kept_apart: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""The modules of each model that were seen to keep examples apart: this is checked once, not in each capture."""


class _Keep(torch.autograd.Function):
    """Keeps tensors as autograd does: under checkpointing they are recomputed, offloading moves them, in-place changes raise."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise AssertionError("never part of a loss")


def keep_until_backward(tensors: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Keep a run's tensors for its backward pass.

    Args:
        tensors: To keep; detached.

    Returns:
        What gives them back; they live as long as it does.
    """
    node: Any = _Keep.apply(torch.zeros((), requires_grad=True), *(tensor.detach() for tensor in tensors)).grad_fn  # type: ignore[no-untyped-call]

    def kept() -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = node.saved_tensors
        return found

    return kept


@dataclass(frozen=True, slots=True)
class Chosen:
    """The layers of the chosen modules, with weights that several of them share counted once.

    Attributes:
        layers: By module name.
        parts: By part name; of layers whose weight is that of an earlier one, none.
        owner: Part name -> (the part that it adds to, whether transposed).
    """

    layers: dict[str, Layer]
    parts: dict[str, Part]
    owner: dict[str, tuple[str, bool]]


def choose_layers(model: nn.Module, names: Sequence[str]) -> Chosen:
    """Look the modules up, and find the weights that they share.

    Args:
        model: The model.
        names: Names of modules.

    Returns:
        Their layers.

    Raises:
        CaptureError: A name is missing, its module is of no known kind, or shares a part of its parameters with another.
    """
    modules = dict(model.named_modules())
    layers: dict[str, Layer] = {}
    parts: dict[str, Part] = {}
    owner: dict[str, tuple[str, bool]] = {}
    owners: dict[int, Layer] = {}
    for name in names:
        layer = layer_of(name, modules[name]) if name in modules else None
        if layer is None:
            what = type(modules[name]).__name__ if name in modules else "no module of that name"
            raise CaptureError(f"module {name!r}: expected a layer that can be captured, found {what}; choose other modules")
        layers[name] = layer
        earlier = next((owners[id(parameter)] for parameter in layer.parameters().values() if id(parameter) in owners), None)
        if earlier is None:
            parts.update((part.name, part) for part in layer.parts)
            owner.update((part.name, (part.name, False)) for part in layer.parts)
        else:
            owner.update(_tie(earlier, layer))
        owners.update((id(parameter), layer) for parameter in layer.parameters().values())
    return Chosen(layers, parts, owner)


def _tie(earlier: Layer, layer: Layer) -> dict[str, tuple[str, bool]]:
    first, second = list(earlier.parameters().values()), list(layer.parameters().values())
    shapes = [
        ((one.out_dim, one.in_dim), (two.out_dim, two.in_dim)) for one, two in zip(earlier.parts, layer.parts, strict=False)
    ]
    same = len(first) == len(second) and all(one is two for one, two in zip(first, second, strict=True))
    swapped = type(earlier) is not type(layer)
    if not same or any(one != (two[::-1] if swapped else two) for one, two in shapes):
        raise CaptureError(
            f"modules {earlier.name!r} and {layer.name!r} share a part of their parameters only, so their gradients cannot be "
            "summed: choose one of them"
        )
    return {two.name: (one.name, swapped) for one, two in zip(earlier.parts, layer.parts, strict=True)}


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
        self._owned: dict[str, list[str]] = {owner: [] for owner in self.parts}
        for name, (owner, _) in self._chosen.owner.items():
            self._owned[owner].append(name)
        self._unchecked = check and not _kept_apart.get(model, set()).issuperset(names)
        self._attached = ExitStack()
        self._entered = False
        self._consume: Consume | None = None
        self._is_token_NT: Tensor | None = None
        self._last_read: tuple[Hashable, Tensor, Tensor] | None = None
        self._forget()

    def __enter__(self) -> Capture:
        self._requires_grad = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        self._training = [(module, module.training) for module in self.model.modules()]
        self._rng = torch.get_rng_state()
        self._cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        for parameter, _ in self._requires_grad:
            parameter.requires_grad_(False)
        self.model.eval()
        for layer in self._chosen.layers.values():
            for attached in layer.attach(self._watch):
                self._attached.enter_context(attached)
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._attached.close()
        self._entered = False
        self._forget()
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
        self._forget()
        with torch.enable_grad():
            losses_N = losses()
            if losses_N.dim() != 1:
                raise CaptureError(f"expected one loss an example, losses_N [N], found a tensor of shape {list(losses_N.shape)}")
            self._raise_if_missing(
                lambda name: any(part.name in self._uses for part in self._chosen.layers[name].parts),
                "never ran forward",
                "choose modules that this model uses",
            )
            self._consume, self._num_examples, self._is_token_NT = consume, len(losses_N), is_token_NT
            if losses_N.requires_grad:
                if self._unchecked and self._num_examples > 1:
                    self._check_apart(losses_N)
                losses_N.sum().backward()
        self._raise_if_missing(
            lambda name: any(part.name in self._received for part in self._chosen.layers[name].parts),
            "got no gradient",
            "the loss does not depend on it: choose other modules",
        )
        self._deliver_rest()
        self._forget()
        return losses_N.detach()

    def _forget(self) -> None:
        self._uses: Counter[str] = Counter()  # runs in this forward pass, by part
        self._received: Counter[str] = Counter()  # of these, those that a gradient reached
        self._summed: dict[str, list[ModuleGradient]] = {}  # by owning part, until its last use is there
        self._delivered: set[str] = set()
        self._checking = False
        self._num_examples = 0
        self._consume = self._is_token_NT = self._last_read = None

    def _raise_if_missing(self, ran: Callable[[str], bool], what: str, remedy: str) -> None:
        missing = [name for name in self._chosen.layers if not ran(name)]
        if missing:
            self._forget()
            number = f"{len(missing)} of {len(self._chosen.layers)} modules"
            raise CaptureError(f"{number} {what}, the first is {missing[0]!r}; {remedy}")

    def _watch(self, layer: Layer, kept: tuple[Tensor, ...], output: Tensor) -> Tensor:
        for part in layer.parts:
            self._uses[part.name] += 1
        if not output.requires_grad:  # every weight is frozen: the graph begins at the first captured module
            output = output.requires_grad_(True).clone()  # cloned: the model may go on in place, which a leaf forbids
        box = [keep_until_backward(kept)]

        def receive(gradient: Tensor) -> None:
            if not box:
                raise CaptureError(f"module {layer.name!r} received a second gradient in one backward pass; leave it out")
            tensors = box[0]()
            if not self._checking:
                box.clear()  # frees this run's inputs while the pass goes on
            self._receive(layer, tensors, gradient.detach())

        output.register_hook(receive)
        return output

    def _receive(self, layer: Layer, kept: tuple[Tensor, ...], gradient: Tensor) -> None:
        activations = self._activations(layer, kept)
        found = layer.gradients(kept, activations, gradient, self._num_examples, self._is_token_NT)
        for name, part_gradient in found.items():
            if self._checking:
                _raise_unless_apart(name, part_gradient)
                continue
            self._received[name] += 1
            owner, swapped = self._chosen.owner[name]
            self._summed.setdefault(owner, []).append(transposed(part_gradient) if swapped else part_gradient)
            if all(self._received[part] == self._uses[part] for part in self._owned[owner]):
                self._deliver(owner)

    def _activations(self, layer: Layer, kept: tuple[Tensor, ...]) -> Tensor:
        """Give modules that read one tensor (q, k, v; gate, up) the same object, so that it is rotated once."""
        read = kept[0]
        key = (layer.reads, read.data_ptr(), read.storage_offset(), read.shape, read.stride(), read.dtype)
        if layer.reads is not None and self._last_read is not None and self._last_read[0] == key:
            return self._last_read[2]
        activations = layer.activations(kept, self._num_examples)
        self._last_read = (key, read, activations)  # the tensor is held: its address stays its own
        return activations

    def _deliver(self, owner: str) -> None:
        if owner in self._delivered or self._consume is None:
            raise CaptureError(f"module {owner!r} received a second gradient in one backward pass; leave it out")
        self._delivered.add(owner)
        self._consume(owner, total(self._summed.pop(owner)))

    def _deliver_rest(self) -> None:
        """Deliver what waited for uses that no gradient reached, and zeros for the experts that saw no token."""
        for owner in list(self._summed):
            self._deliver(owner)
        for layer in self._chosen.layers.values():
            for part in layer.parts:
                if self._chosen.owner[part.name][0] not in self._delivered:
                    weight = next(iter(layer.parameters().values()))
                    empty = (
                        weight.new_zeros(self._num_examples, 0, part.in_dim),
                        weight.new_zeros(self._num_examples, 0, part.out_dim),
                    )
                    self._summed[part.name] = [Outer(*empty)]
                    self._deliver(part.name)

    def _check_apart(self, losses_N: Tensor) -> None:
        self._checking = True
        losses_N[0].backward(retain_graph=True)
        self._checking, self._unchecked, self._last_read = False, False, None
        _kept_apart.setdefault(self.model, set()).update(self._chosen.layers)


def _raise_unless_apart(name: str, gradient: ModuleGradient) -> None:
    """The gradient of example 0's loss must lie in row 0 alone."""
    from_others = getattr(gradient, "output_gradients_NTO", getattr(gradient, "output_gradients_NTGO", None))
    if from_others is None:
        from_others = gradient.dense()
    if from_others[1:].count_nonzero() and torch.isfinite(from_others).all():
        raise CaptureError(
            f"module {name!r}: expected the loss of an example to depend on that example only, found that another one's rows get "
            "a gradient from it: the batch is not the first dimension (batch_first=False, routed tokens), or the model mixes"
            "its examples (a loss averaged over the batch, batch statistics); run examples one by one, or leave the module out"
        )


def refuse_compiled(model: nn.Module) -> None:
    """Raise a CaptureError for a model under ``torch.compile``: it hides its modules' runs.

    Args:
        model: The model.

    Raises:
        CaptureError: It, or a module in it, is compiled.
    """
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise CaptureError(
                f"{name or 'the model'} is under torch.compile, which hides its modules' runs: pass the model as it was "
                "before (torch.compile(model)._orig_mod), and compile after the capture"
            )

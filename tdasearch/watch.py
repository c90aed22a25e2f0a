"""Watching the runs of chosen modules in a model's forward pass, and summing their gradients in its backward pass.

What captures share, whoever runs the model: in come modules by name, out go the example gradients of one pass over a batch, part
by part (``gradients.ModuleGradient``). Knows nothing of losses, text or storage.

Legend: N examples, T positions, I inputs, O outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tdasearch.errors import CaptureError
from tdasearch.gradients import ModuleGradient, Outer, total, transposed
from tdasearch.layers import Layer, Part, Watch, layer_of
from tdasearch.layers.adapter import refuse_inactive

Consume = Callable[[str, ModuleGradient], None]
"""Called with a part's name and its gradients, once a part and pass."""


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

    def attach(self, watch: Watch) -> ExitStack:
        """Begin to watch the layers' runs.

        Args:
            watch: Called in each run that is differentiated.

        Returns:
            What undoes it when it is closed.
        """
        attached = ExitStack()
        for layer in self.layers.values():
            for one in layer.attach(watch):
                attached.enter_context(one)
        return attached


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
    refuse_inactive(model, names)
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
        for parameter in layer.parameters().values():
            owners.setdefault(id(parameter), layer)  # the first one: every later use adds to it
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


class Pass:
    """One forward and backward pass over a batch: the uses of each part are summed, and delivered when the last one is there.

    Autograd's graph holds a pass through the hooks on its outputs, and a pass holds no graph: it dies with it.

    Args:
        chosen: The layers.
        consume: Receives each part's gradients, last module first.

    Attributes:
        num_examples: N; to be set before the backward pass.
        num_rows: Rows of the batch where ``split`` makes several examples of one; 0: N.
        is_token_NT: [N, T] False at padding; None: positions with a gradient.
        split: Applied to the gradients of each use before they are summed.
        inspect: Receives the gradients of each use in the place of ``consume``; the pass can be differentiated again.
        used: Runs of each part in the forward pass.
        received: Of these, those that a gradient reached.
    """

    def __init__(self, chosen: Chosen, consume: Consume) -> None:
        self._chosen = chosen
        self._consume = consume
        self._owned: dict[str, list[str]] = {owner: [] for owner in chosen.parts}
        for name, (owner, _) in chosen.owner.items():
            self._owned[owner].append(name)
        self.num_examples = self.num_rows = 0
        self.is_token_NT: Tensor | None = None
        self.split: Callable[[str, ModuleGradient], ModuleGradient] | None = None
        self.inspect: Consume | None = None
        self.used: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self._summed: dict[str, list[ModuleGradient]] = {}  # by owning part, until its last use is there
        self._delivered: set[str] = set()
        self._last_read: tuple[Hashable, Tensor, Tensor] | None = None

    def watch(self, layer: Layer, kept: tuple[Tensor, ...], output: Tensor, *, recomputed: bool = False) -> Tensor:
        """Note a run of a layer, and receive the gradient of its output later.

        Args:
            layer: Which.
            kept: Its tensors to keep.
            output: Its output.
            recomputed: The run happens in the backward pass (gradient checkpointing): it is no further use. The gradient reaches
                its output where the first run was not differentiated, else the first one's.

        Returns:
            The output to go on with.
        """
        if not recomputed:
            self.used.update(part.name for part in layer.parts)
        if not output.requires_grad:  # every weight is frozen: the graph begins at the first captured module
            output = output.requires_grad_(True).clone()  # cloned: the model may go on in place, which a leaf forbids
        box = [keep_until_backward(kept)]

        def receive(gradient: Tensor) -> None:
            if not box:
                raise _second_gradient(layer.name)
            tensors = box[0]()
            if self.inspect is None:
                box.clear()  # frees this run's inputs while the pass goes on
            self._receive(layer, tensors, gradient.detach())

        output.register_hook(receive)
        return output

    def _receive(self, layer: Layer, kept: tuple[Tensor, ...], gradient: Tensor) -> None:
        activations = self._activations(layer, kept)
        found = layer.gradients(kept, activations, gradient, self.num_rows or self.num_examples, self.is_token_NT)
        for name, one in found.items():
            part_gradient = one if self.split is None else self.split(name, one)
            if self.inspect is not None:
                self.inspect(name, part_gradient)
                continue
            self.received[name] += 1
            owner, swapped = self._chosen.owner[name]
            self._summed.setdefault(owner, []).append(transposed(part_gradient) if swapped else part_gradient)
            if all(self.received[part] == self.used[part] for part in self._owned[owner]):
                self._deliver(owner)

    def _activations(self, layer: Layer, kept: tuple[Tensor, ...]) -> Tensor:
        """Give modules that read one tensor (q, k, v; gate, up) the same object, so that it is rotated once."""
        read = kept[0]
        key = (layer.reads, read.data_ptr(), read.storage_offset(), read.shape, read.stride(), read.dtype)
        if layer.reads is not None and self._last_read is not None and self._last_read[0] == key:
            return self._last_read[2]
        activations = layer.activations(kept, self.num_rows or self.num_examples)
        self._last_read = (key, read, activations)  # the tensor is held: its address stays its own
        return activations

    def _deliver(self, owner: str) -> None:
        if owner in self._delivered:
            raise _second_gradient(owner)
        self._delivered.add(owner)
        self._consume(owner, total(self._summed.pop(owner)))

    def raise_if_missing(self, counts: Counter[str], what: str, remedy: str) -> None:
        """Raise an error if a layer has no part in ``counts`` (``used`` or ``received``).

        Args:
            counts: By part.
            what: What did not happen to the layer.
            remedy: What to do.

        Raises:
            CaptureError: There is such a layer.
        """
        layers = self._chosen.layers
        missing = [name for name, layer in layers.items() if not any(part.name in counts for part in layer.parts)]
        if missing:
            raise CaptureError(f"{len(missing)} of {len(layers)} modules {what}, the first is {missing[0]!r}; {remedy}")

    def finish(self) -> None:
        """Deliver what waited for uses that no gradient reached, and zeros for the experts that saw no token."""
        for owner in list(self._summed):
            self._deliver(owner)
        for layer in self._chosen.layers.values():
            for part in layer.parts:
                if self._chosen.owner[part.name][0] not in self._delivered:
                    weight = next(iter(layer.parameters().values()))
                    a, g = (  # not weight.new_zeros: FSDP2's weights make sharded ones
                        torch.zeros(self.num_examples, 0, dim, dtype=weight.dtype, device=weight.device)
                        for dim in (part.in_dim, part.out_dim)
                    )
                    self._summed[part.name] = [Outer(a, g)]
                    self._deliver(part.name)
        self._last_read = None


def _second_gradient(name: str) -> CaptureError:
    return CaptureError(
        f"module {name!r} received a second gradient in one backward pass, or its pass was differentiated twice; leave it out"
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

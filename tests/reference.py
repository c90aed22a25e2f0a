"""Influence the slow and obvious way, in float64: what every fast part is compared with. Imports nothing from tdasearch.

One document alone, no padding, eval mode, eager attention, one backward pass each; curvature as an explicit matrix that
``numpy.linalg.solve`` inverts; search as a sort. Legend: T positions, I inputs (one more for the bias), O outputs, N documents,
Q queries. A module's gradient is always [O, I], with the bias gradient as its last column, and is flattened row by row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Array = NDArray[np.float64]
Gradients = dict[str, Array]
Captured = dict[str, tuple[Array, Array]]


class Example(NamedTuple):
    """What a loss is taken on.

    Attributes:
        token_ids: [T] the tokens, prompt and completion alike.
        is_target: [T] whether the loss is taken on the prediction of token t. Never true for token 0.
    """

    token_ids: Sequence[int]
    is_target: Sequence[bool]


def whole_text(token_ids: Sequence[int]) -> Example:
    """Return an example whose targets are all tokens but the first, as those of a document without a prompt are."""
    return Example(token_ids, [False] + [True] * (len(token_ids) - 1))


class FullPrecision(TorchFunctionMode):
    """While entered, float64 wherever a model's own code asks for float32 (Llama's norms, softmax and rotary angles do)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        """Return what ``func`` gives with float64 in the place of every float32."""
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*wide, **named)


def reference_model(model: nn.Module) -> nn.Module:
    """Return a copy in float64 and eval mode, with eager attention and every parameter trainable; the model itself stays."""
    exact = copy.deepcopy(model).to(torch.float64).eval().requires_grad_(True)
    if isinstance(exact, PreTrainedModel):
        exact.set_attn_implementation("eager")
    return exact


def block_linear_names(model: nn.Module) -> list[str]:
    """Return the names of every linear map (Linear or Conv1D) inside the transformer blocks, in the model's order."""
    blocks = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    return [name for name in linear if any(name.startswith(block + ".") for block in blocks)]


# ---- losses and gradients (R1) ----


def token_losses(model: nn.Module, token_ids: Sequence[int]) -> Tensor:
    """-log p(token | tokens before it), with its graph.

    Args:
        model: From ``reference_model``; called with ``input_ids`` [1, T], returns an object with ``logits`` [1, T, vocabulary].
        token_ids: [T] the tokens.

    Returns:
        [T - 1] nats; entry t belongs to token t + 1.

    Raises:
        ValueError: If the model is not in float64 or not in eval mode.
    """
    if model.training or next(model.parameters()).dtype != torch.float64:
        raise ValueError("expected a model in float64 and eval mode; make it with reference_model(model)")
    ids = torch.tensor([list(token_ids)])
    with FullPrecision():
        logits = model(input_ids=ids, use_cache=False).logits[0]
        log_probabilities = torch.log_softmax(logits, dim=-1)
    return torch.stack([-log_probabilities[t - 1, ids[0, t]] for t in range(1, ids.shape[1])])


def loss(model: nn.Module, example: Example) -> Tensor:
    """Return the sum of the example's target losses (nats), with its graph.

    Raises:
        ValueError: If the mask has another length than the tokens, marks token 0, or marks none.
    """
    if len(example.is_target) != len(example.token_ids) or example.is_target[0] or not any(example.is_target):
        raise ValueError("expected one flag a token, token 0 no target and one target at least")
    losses = token_losses(model, example.token_ids)
    return torch.stack([losses[t - 1] for t in range(1, len(example.token_ids)) if example.is_target[t]]).sum()


def _parameters(model: nn.Module, name: str) -> list[nn.Parameter]:
    """Return a module's weight and, if it has one, its bias."""
    own = dict(model.get_submodule(name).named_parameters(recurse=False))
    return [own[part] for part in ("weight", "bias") if part in own]


def _canonical(module: nn.Module, parameters: Sequence[Tensor]) -> Array:
    """Return weight and bias (or their gradients) as one [O, I] array."""
    weight = parameters[0].detach().numpy()
    weight_OI = weight.T if isinstance(module, Conv1D) else weight
    columns = [weight_OI] + [bias.detach().numpy()[:, None] for bias in parameters[1:]]
    return np.concatenate(columns, axis=1)


def module_gradients(model: nn.Module, example: Example, names: Sequence[str]) -> Gradients:
    """The gradient of ``loss`` with respect to each named module.

    Args:
        model: From ``reference_model``.
        example: What the loss is taken on.
        names: Modules, each Linear or Conv1D.

    Returns:
        [O, I] for each name; I counts the bias, if there is one, as the last column.
    """
    parameters = {name: _parameters(model, name) for name in names}
    flat = [parameter for one in parameters.values() for parameter in one]
    gradients = iter(torch.autograd.grad(loss(model, example), flat))
    return {name: _canonical(model.get_submodule(name), [next(gradients) for _ in one]) for name, one in parameters.items()}


def capture(model: nn.Module, example: Example, names: Sequence[str]) -> Captured:
    """What goes into each module and the gradient that comes out, at every position: G = sum_t g_t a_t^T.

    Args:
        model: From ``reference_model``.
        example: What the loss is taken on.
        names: Modules, each Linear or Conv1D.

    Returns:
        Activations [T, I], with a 1 appended if the module has a bias, and output gradients [T, O], for each name.
    """
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _module, inputs, output, name=name: seen[name].append((inputs[0], output))
        )
        for name in names
    ]
    try:
        value = loss(model, example)
    finally:
        for hook in hooks:
            hook.remove()
    assert all(len(calls) == 1 for calls in seen.values()), "each module is called once in a forward pass"
    output_gradients = torch.autograd.grad(value, [seen[name][0][1] for name in names])
    captured = {}
    for name, gradient in zip(names, output_gradients, strict=True):
        activations_TI = seen[name][0][0][0].detach().numpy()
        if model.get_submodule(name).bias is not None:
            activations_TI = np.concatenate([activations_TI, np.ones((len(activations_TI), 1))], axis=1)
        captured[name] = (activations_TI, gradient[0].numpy())
    return captured


# ---- curvature (R3) ----


@dataclass(frozen=True)
class Curvature:
    """K-FAC or EK-FAC of one module.

    Attributes:
        activation_covariance: [I, I] A, the mean of a a^T over positions.
        gradient_covariance: [O, O] S, the mean of g g^T over positions.
        activation_eigenvectors: [I, I] U_A, one a column.
        gradient_eigenvectors: [O, O] U_S, one a column.
        eigenvalues: [O, I] Lambda.
        damping: What is added to every eigenvalue.
    """

    activation_covariance: Array
    gradient_covariance: Array
    activation_eigenvectors: Array
    gradient_eigenvectors: Array
    eigenvalues: Array
    damping: float

    def dense(self) -> Array:
        """Return [O * I, O * I], the curvature matrix F without damping, for gradients flattened row by row."""
        basis = np.kron(self.gradient_eigenvectors, self.activation_eigenvectors)
        return (basis * self.eigenvalues.reshape(-1)) @ basis.T


def fit_module(documents: Sequence[tuple[Array, Array]], *, method: str = "ekfac", damping_scale: float = 0.1) -> Curvature:
    """Fit one module's curvature.

    Args:
        documents: Activations [T, I] and output gradients [T, O] of each document, as ``capture`` gives them.
        method: ``ekfac`` (George et al. 2018, arXiv 1806.03884: mean over documents of the squared rotated gradient) or ``kfac``
            (outer product of the factors' eigenvalues, times positions per document, which brings it to the same unit).
        damping_scale: damping = damping_scale * mean(Lambda).

    Returns:
        The curvature.

    Raises:
        ValueError: If the method is neither.
    """
    activations = np.concatenate([a_TI for a_TI, _ in documents])
    gradients = np.concatenate([g_TO for _, g_TO in documents])
    covariance_A = activations.T @ activations / len(activations)
    covariance_S = gradients.T @ gradients / len(gradients)
    values_a, U_A = (factor.numpy() for factor in torch.linalg.eigh(torch.from_numpy(covariance_A)))
    values_s, U_S = (factor.numpy() for factor in torch.linalg.eigh(torch.from_numpy(covariance_S)))
    if method == "ekfac":
        eigenvalues = np.mean([(U_S.T @ (g_TO.T @ a_TI) @ U_A) ** 2 for a_TI, g_TO in documents], axis=0)
    elif method == "kfac":
        eigenvalues = np.outer(values_s.clip(min=0), values_a.clip(min=0)) * (len(activations) / len(documents))
    else:
        raise ValueError(f"expected 'ekfac' or 'kfac', found {method!r}")
    return Curvature(covariance_A, covariance_S, U_A, U_S, eigenvalues, damping_scale * float(eigenvalues.mean()))


def fit(
    model: nn.Module, examples: Sequence[Example], names: Sequence[str], *, method: str = "ekfac", damping_scale: float = 0.1
) -> dict[str, Curvature]:
    """Fit every named module's curvature on the examples' own targets (the empirical Fisher), over all their positions.

    Args:
        model: From ``reference_model``.
        examples: The documents of the fit.
        names: Modules, each Linear or Conv1D.
        method: ``ekfac`` or ``kfac``, as in ``fit_module``.
        damping_scale: damping = damping_scale * mean(Lambda).

    Returns:
        The curvature for each name.
    """
    captured = [capture(model, example, names) for example in examples]
    return {name: fit_module([one[name] for one in captured], method=method, damping_scale=damping_scale) for name in names}


def precondition(gradients: Sequence[Gradients], curvature: dict[str, Curvature]) -> list[Gradients]:
    """(F + damping)^-1 times each gradient, module by module, by a dense solve.

    Args:
        gradients: [O, I] for each module, one dict an example.
        curvature: For each module.

    Returns:
        The same shapes.
    """
    solved: list[Gradients] = [{} for _ in gradients]
    for name, one in curvature.items():
        right_hand_sides = np.stack([gradient[name].reshape(-1) for gradient in gradients], axis=1)
        damped = one.dense() + one.damping * np.eye(one.eigenvalues.size)
        for result, column in zip(solved, np.linalg.solve(damped, right_hand_sides).T, strict=True):
            result[name] = column.reshape(one.eigenvalues.shape)
    return solved


# ---- influence and search (R4, R8) ----


def dot(left: Gradients, right: Gradients) -> float:
    """Return the inner product over all modules of ``left``."""
    return float(sum(np.vdot(left[name], right[name]) for name in left))


def influences(
    queries: Sequence[Gradients], documents: Sequence[Gradients], curvature: dict[str, Curvature] | None = None
) -> Array:
    """g_q^T (F + damping)^-1 g_d for every pair; g_q^T g_d without a curvature.

    Args:
        queries: Q gradients, from ``module_gradients``.
        documents: N gradients.
        curvature: From ``fit``, or None for grad-dot.

    Returns:
        [Q, N]; positive: training on the document lowers the query's loss.
    """
    left = queries if curvature is None else precondition(queries, curvature)
    return np.array([[dot(query, document) for document in documents] for query in left])


def self_influences(examples: Sequence[Gradients], curvature: dict[str, Curvature] | None = None) -> Array:
    """Return [N], the influence of each example on itself: the squared length of its whitened gradient."""
    left = examples if curvature is None else precondition(examples, curvature)
    return np.array([dot(one, other) for one, other in zip(left, examples, strict=True)])


def cosines(queries: Sequence[Gradients], documents: Sequence[Gradients], curvature: dict[str, Curvature] | None = None) -> Array:
    """Return [Q, N], the influence between vectors of unit length in the whitened space (grad-cos without a curvature)."""
    solved = precondition([*queries, *documents], curvature) if curvature is not None else [*queries, *documents]
    left, right = solved[: len(queries)], [*queries, *documents]
    lengths = np.sqrt([dot(one, other) for one, other in zip(solved, right, strict=True)])
    scores_QN = np.array([[dot(query, document) for document in documents] for query in left])
    return scores_QN / lengths[: len(queries), None] / lengths[None, len(queries) :]


def search(scores_N: Array, document_ids: Sequence[str], k: int) -> list[tuple[str, float]]:
    """Return the k best documents, highest score first, equal scores by id. Negate the scores for opponents."""
    pairs = zip(document_ids, scores_N.tolist(), strict=True)
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:k]


def influence_by_step(model: nn.Module, query: Example, direction: Gradients, *, step_size: float = 1e-6) -> float:
    """How much the query's loss falls, per unit of step, when the modules really take the step theta - step_size * direction.

    Tends to ``dot(module_gradients(query), direction)`` as step_size tends to 0: grad-dot where the direction is a document's
    gradient, K-FAC or EK-FAC influence where it is a preconditioned one.

    Args:
        model: From ``reference_model``; left as it is.
        query: What the loss is measured on.
        direction: [O, I] for each module that moves.
        step_size: Small and positive.

    Returns:
        (loss before - loss after) / step_size.
    """
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, change_OI in direction.items():
            change, (weight, *bias) = torch.from_numpy(change_OI), _parameters(moved, name)
            for one in bias:
                one.sub_(step_size * change[:, -1])
                change = change[:, :-1]
            weight.sub_(step_size * (change.T if isinstance(moved.get_submodule(name), Conv1D) else change))
        return (loss(model, query) - loss(moved, query)).item() / step_size

"""Influence of documents on queries for any model and loss, exact and without an index: EK-FAC in memory.

    influence(q, d) = g_q^T (F + damping)^-1 g_d        (Grosse et al. 2023, arXiv 2308.03296, equation 30)

Legend: Q queries, N documents, I inputs, O outputs of a part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tdasearch.capture import Capture
from tdasearch.curvature import ModuleFactors
from tdasearch.errors import UsageError
from tdasearch.fitting import METHODS, Run, fit_runs
from tdasearch.gradients import Dense, ModuleGradient, in_chunks
from tdasearch.modules import choose_modules
from tdasearch.operations import inner_products
from tdasearch.progress import progress
from tdasearch.task import Losses, Task

_GROUP_BYTES = 2 << 30
"""Bound on the preconditioned gradients of the queries that share one pass over the documents."""


def influence(
    model: nn.Module,
    task: Task,
    documents: Sequence[Any],
    queries: Sequence[Any],
    *,
    modules: Sequence[str] = (),
    kinds: Sequence[str] = (),
    blocks: str | None = None,
    method: str = "ekfac",
    fit_documents: int | None = None,
    damping_scale: float = 0.1,
    batch_size: int = 8,
    quiet: bool = False,
) -> Tensor:
    """Score every document against every query.

    Args:
        model: Any model; it is handed back as it came. It is run in evaluation mode.
        task: Its losses.
        documents: Training examples, as the task's ``collate`` takes them.
        queries: Examples whose loss is to be explained, of the same kind.
        modules: Shell patterns of module names, as in ``build_index``.
        kinds: Kinds of layers, as in ``build_index``.
        blocks: Range of blocks, as in ``build_index``.
        method: "ekfac" or "kfac".
        fit_documents: The factors are fitted on so many documents, evenly spread; None: on all.
        damping_scale: A module's damping as a multiple of its mean eigenvalue.
        batch_size: Examples run at once.
        quiet: Show no progress.

    Returns:
        scores_QN [Q, N] float64 on the CPU: how much a step against the document's loss lowers the query's, to first order.
        Positive: the document helped.

    Raises:
        UsageError: No documents or queries, or an option out of range.
    """
    if not len(documents) or not len(queries):
        raise UsageError(f"expected documents and queries, found {len(documents)} and {len(queries)}")
    if method not in METHODS:
        raise UsageError(f"method: expected one of {', '.join(METHODS)}, found {method!r}")
    for name, value in (("batch_size", batch_size), ("fit_documents", 1 if fit_documents is None else fit_documents)):
        if value < 1:
            raise UsageError(f"{name}: expected at least 1, found {value!r}")
    if not 0.0 < damping_scale < math.inf:
        raise UsageError(f"damping_scale: expected above 0, found {damping_scale!r}")
    coverage = choose_modules(model, patterns=modules, kinds=kinds, blocks=blocks)
    sample = _spread(documents, fit_documents)
    passes = 2 if method == "ekfac" else 1
    with Capture(model, coverage.names) as capture:
        with progress("fit", total=passes * len(sample), unit="doc", quiet=quiet) as step:
            runs = _runs(model, task, sample, batch_size, task.fisher_losses or task.losses)
            factors = fit_runs(capture, runs, method=method, damping_scale=damping_scale, step=step, quiet=quiet)
        scores_QN = torch.zeros(len(queries), len(documents), dtype=torch.float64)
        group = max(1, _GROUP_BYTES // (4 * coverage.num_covered_parameters))
        with progress("score", total=len(documents) * -(-len(queries) // group), unit="doc", quiet=quiet) as step:
            for start in range(0, len(queries), group):
                preconditioned = _preconditioned(capture, factors, _runs(model, task, queries[start : start + group], batch_size))
                column = 0
                for run in _runs(model, task, documents, batch_size):
                    scores = _scores(capture, run, preconditioned)
                    scores_QN[start : start + group, column : column + run.size] = scores
                    column += run.size
                    step(run.size)
    return scores_QN


def _spread(documents: Sequence[Any], number: int | None) -> Sequence[Any]:
    if number is None or number >= len(documents):
        return documents
    return [documents[n * len(documents) // number] for n in range(number)]


def _runs(model: nn.Module, task: Task, rows: Sequence[Any], batch_size: int, losses: Losses | None = None) -> list[Run]:
    def run(batch_rows: Sequence[Any]) -> Tensor:  # collated when it runs: a corpus of batches is never held
        return (losses or task.losses)(model, task.collate(batch_rows))

    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    return [Run(partial(run, batch), None, len(batch)) for batch in batches]


def _preconditioned(capture: Capture, factors: dict[str, ModuleFactors], runs: Sequence[Run]) -> dict[str, Tensor]:
    """``(F + damping)^-1 G`` [Q, O, I] of every part."""
    found: dict[str, list[Tensor]] = {name: [] for name in capture.parts}

    def consume(name: str, gradient: ModuleGradient) -> None:
        for chunk in in_chunks(gradient, _GROUP_BYTES // 8):
            found[name].append(factors[name].precondition(chunk.dense().to(factors[name].eigenvalues.dtype)))

    for run in runs:
        capture.backward(run.losses, consume)
    return {name: torch.cat(chunks) for name, chunks in found.items()}


def _scores(capture: Capture, run: Run, preconditioned: dict[str, Tensor]) -> Tensor:
    parts: list[Tensor] = []

    def consume(name: str, gradient: ModuleGradient) -> None:
        parts.append(inner_products(Dense(preconditioned[name]), gradient).double().cpu())

    capture.backward(run.losses, consume)
    return torch.stack(parts).sum(0)

"""The plan: what a budget buys. Which modules, how much of each eigenbasis, how many index dimensions, which code."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tdasearch.codes import CODES, sketch_dim_for
from tdasearch.curvature import rotated_sides
from tdasearch.encoder import rank
from tdasearch.errors import UsageError
from tdasearch.fitting import METHODS
from tdasearch.indexer.job import Cut
from tdasearch.layers import Part
from tdasearch.modules import Coverage
from tdasearch.store.manifest import FISHERS, Plan

_MEMORY_UNITS = {"GB": 1 << 30, "GIB": 1 << 30, "TB": 1 << 40}
_UNITS = {"": 1, "B": 1, "KB": 1 << 10, "KIB": 1 << 10, "MB": 1 << 20, "MIB": 1 << 20}
_MAX_BUDGET = 2**31
_MIN_FIT_DOCUMENTS, _MAX_FIT_DOCUMENTS = 1_000, 20_000


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Everything a user may choose about an index; ``build_index`` documents each.

    1-bit codes are the default because they hold more of the ranking a byte than any other.
    """

    method: str = "ekfac"
    budget: str | int = "1KB"
    code: str = "1bit"
    modules: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    blocks: str | None = None
    eigenbasis_share: float | None = None
    window_tokens: int | None = None
    stride: int | None = None
    max_windows: int | None = None
    fisher: str = "sampled"
    fit_documents: int | str | None = None
    damping_scale: float = 0.1
    seed: int = 0
    shard_documents: int = 256

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        _one_of("code", self.code, CODES)
        _one_of("fisher", self.fisher, FISHERS)
        share = self.eigenbasis_share
        _within("eigenbasis_share", share, share is None or 0.0 < share <= 1.0, "above 0 and at most 1")
        _within("damping_scale", self.damping_scale, 0.0 < self.damping_scale < math.inf, "above 0")
        _within("seed", self.seed, 0 <= self.seed < 2**63, "from 0 to 2^63 - 1")
        _within("shard_documents", self.shard_documents, 1 <= self.shard_documents < 2**31, "from 1 to 2^31 - 1")
        windows = self.max_windows
        _within("max_windows", windows, windows is None or 1 <= windows < 2**31, "from 1 to 2^31 - 1")
        if not (self.fit_documents in (None, "all") or (isinstance(self.fit_documents, int) and self.fit_documents >= 1)):
            raise UsageError(f"fit_documents: expected a number of at least 1, or 'all', found {self.fit_documents!r}")
        budget_bytes(self.budget)


def budget_bytes(budget: str | int) -> int:
    """Read a budget such as "1KB" (1,024 bytes), "512" or 2048.

    Args:
        budget: Bytes a row of the index; KB and MB are powers of 1,024.

    Returns:
        Bytes.

    Raises:
        UsageError: It is no such amount.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(budget))
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"budget: expected bytes a document such as 1KB, 512B or 4096, found {budget!r}")
    found = int(float(match[1]) * _UNITS[match[2].upper()])
    _within("budget", budget, found < _MAX_BUDGET, "less than 2 GB a document")
    return found


def memory_bytes(memory: str | int) -> int:
    """Read an amount of memory such as "8GB" (8 * 1,024^3 bytes) or a number of bytes.

    Args:
        memory: The amount.

    Returns:
        Bytes.

    Raises:
        UsageError: It is no such amount.
    """
    units = _UNITS | _MEMORY_UNITS
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(memory))
    if match is None or match[2].upper() not in units:
        raise UsageError(f"memory: expected an amount such as 8GB or 512MB, found {memory!r}")
    return int(float(match[1]) * units[match[2].upper()])


def cut_of(options: BuildOptions, *, max_tokens: int) -> Cut:
    """Choose how documents are cut.

    Args:
        options: The user's choices.
        max_tokens: The model's context.

    Returns:
        Windows of 1,024 tokens (or the context where it is shorter) that overlap by an eighth, unless chosen otherwise.

    Raises:
        UsageError: A window longer than the context, or a stride that would leave gaps.
    """
    window = min(1024, max_tokens) if options.window_tokens is None else options.window_tokens
    if not 2 <= window <= max_tokens:
        raise UsageError(f"window: expected 2 to {max_tokens} tokens (the model's context), found {window}")
    stride = window - window // 8 if options.stride is None else options.stride
    if not 1 <= stride <= window:
        raise UsageError(f"stride: expected 1 to {window} tokens (the window), found {stride}")
    return Cut(window, stride, options.max_windows, options.shard_documents)


def cut_of_plan(plan: Plan) -> Cut:
    """Return how the documents of an index were cut, for those that are added."""
    return Cut(plan.window_tokens, plan.stride, plan.max_windows, plan.shard_documents)


def choose_plan(options: BuildOptions, coverage: Coverage, *, max_tokens: int, num_documents: int) -> Plan:
    """Choose the plan of an index.

    Args:
        options: The user's choices.
        coverage: The covered modules.
        max_tokens: The model's context.
        num_documents: Documents of the corpus.

    Returns:
        The plan. Where all coordinates that are kept fit the budget, the sketch is exact.
    """
    cut = cut_of(options, max_tokens=max_tokens)
    sketch_dim = sketch_dim_for(options.code, budget_bytes(options.budget))
    share = options.eigenbasis_share or _eigenbasis_share(coverage, sketch_dim)
    return Plan(
        modules=coverage.names,
        num_covered_parameters=coverage.num_covered_parameters,
        eigenbasis_share=share,
        sketch_dim=min(sketch_dim, -(-_num_coordinates(coverage, share) // 8) * 8),  # whole bytes of 1-bit codes
        code=options.code,
        window_tokens=cut.window_tokens,
        stride=cut.stride,
        max_windows=cut.max_windows,
        damping_scale=options.damping_scale,
        fisher=options.fisher,
        fit_documents=_fit_documents(options.fit_documents, num_documents),
        seed=options.seed,
        budget_bytes=budget_bytes(options.budget),
        shard_documents=cut.shard_documents,
    )


def _num_coordinates(coverage: Coverage, share: float) -> int:
    return sum(math.prod(_ranks(part, share)) for part in coverage.parts)


def _ranks(part: Part, share: float) -> tuple[int, int]:
    rotated_in, rotated_out = rotated_sides(part)
    return rank(part.out_dim, share) if rotated_out else part.out_dim, rank(part.in_dim, share) if rotated_in else part.in_dim


def _eigenbasis_share(coverage: Coverage, sketch_dim: int) -> float:
    # A quarter brings as many true answers into a shortlist of 200 as a half does (.98 of the true top 10 of 9,000 documents at
    # 1 KB), at half the cost. More where the budget holds more coordinates without any sketching, as in a small model.
    shares = [step / 64 for step in range(64, 16, -1)]
    return next((share for share in shares if _num_coordinates(coverage, share) <= sketch_dim), 0.25)


def _fit_documents(asked: int | str | None, num_documents: int) -> int:
    """A twentieth of the corpus, within bounds, unless the user says otherwise."""
    if isinstance(asked, int):
        return min(asked, num_documents)
    if asked == "all":
        return num_documents
    return min(num_documents, max(_MIN_FIT_DOCUMENTS, min(num_documents // 20, _MAX_FIT_DOCUMENTS)))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    _within(name, value, value in allowed, "one of " + ", ".join(allowed))


def _within(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise UsageError(f"{name}: expected {expected}, found {value!r}")

"""What the cost model chooses for an index: for each module and step, both routes' predicted seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tdasearch import route_work
from tdasearch.cost_model import ROUTES, Work, constants, device_name
from tdasearch.encoder import rank
from tdasearch.errors import StoreError
from tdasearch.gradients import Size
from tdasearch.operations import CHUNK_BYTES
from tdasearch.store.factors import FactorShape, factor_shapes
from tdasearch.store.manifest import Manifest


def explain_costs(
    path: Path, manifest: Manifest, *, device: torch.device, batch_tokens: int, num_queries: int = 1
) -> list[dict[str, Any]]:
    """Predict what each module's gradients of one batch of whole windows cost, by each route.

    Args:
        path: The index's folder.
        manifest: Its manifest.
        device: Where it is computed.
        batch_tokens: Tokens run at once.
        num_queries: Queries that are rescored together.

    Returns:
        Plain values, a row for each module and step: "encode" rotates a document's gradient into the part of the eigenbasis that
        is kept, "fit" into the whole one, "rescore" takes inner products with preconditioned queries. ``route`` is the one that
        is chosen; "factored" rotates first, "dense" multiplies first. Modules whose Fisher is diagonal are not rotated: they
        have no row.

    Raises:
        StoreError: The index has no factors yet.
    """
    if not manifest.encoder_fingerprint:
        raise StoreError(f"{path}: the build was stopped before its factors were fitted; run the same build again to go on")
    plan = manifest.plan
    num_positions = plan.window_tokens
    num_examples = max(1, batch_tokens // num_positions)
    found, name_of_device = constants(device, torch.float32), device_name(device)
    rotated: set[str] = (
        set()
    )  # eigenbases of activations that an earlier module in the backward pass, which runs from the end, used
    rows = []
    for name, shape in reversed(factor_shapes(path).items()):
        if not (shape.rotated_in or shape.rotated_out):
            continue
        size = Size("outer", num_examples, num_positions, 1, shape.out_dim, shape.in_dim)
        for step, count, ranks in _steps(size, shape, shape.leader in rotated, plan.eigenbasis_share, num_queries):
            seconds = {route: found.seconds(count(route)) for route in ROUTES}
            rows.append(
                {
                    "module": name,
                    "step": step,
                    "num_examples": num_examples,
                    "num_positions": num_positions,
                    "out_dim": shape.out_dim,
                    "in_dim": shape.in_dim,
                    "out_rank": ranks[0],
                    "in_rank": ranks[1],
                    "factored_seconds": seconds["factored"],
                    "dense_seconds": seconds["dense"],
                    "route": min(ROUTES, key=lambda route: seconds[route]),
                    "device": name_of_device,
                }
            )
        rotated.add(shape.leader)
    return rows


Count = Callable[[Any], Work]


def _steps(
    size: Size, shape: FactorShape, activations_rotated: bool, share: float, num_queries: int
) -> Iterator[tuple[str, Count, tuple[int, int]]]:
    for step, kept in (("fit", 1.0), ("encode", share)):
        o = rank(shape.out_dim, kept) if shape.rotated_out else None
        i = rank(shape.in_dim, kept) if shape.rotated_in else None

        def rotate(route: Any, o: int | None = o, i: int | None = i) -> Work:
            return route_work.rotation(size, o, i, activations_rotated, torch.float32.itemsize, route)

        yield step, rotate, (o or shape.out_dim, i or shape.in_dim)
    queries = Size("dense", num_queries, 0, 1, shape.out_dim, shape.in_dim)

    def products(route: Any) -> Work:
        return route_work.inner_products(size, queries, torch.float32.itemsize, CHUNK_BYTES, route)

    yield "rescore", products, (shape.out_dim, shape.in_dim)

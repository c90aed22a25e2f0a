"""How well the cost model predicts, and how often the route that it chooses is the faster one.

    python examples/benchmarks/cost_model.py [--repeats 3] [--all]

Each operation is run by both routes on random gradients of modules of common widths, for examples of 16 to 1,024 tokens, 1,024
tokens a batch, in float32. Measured is process CPU time, the least of the repeats (of one where a run takes a quarter of a
second). Printed for each operation: the median of predicted over measured seconds and the range that holds nine tenths; how often
the chosen route was the faster one (of all cases, and of those where the routes differ by a fifth or more); and the time of the
chosen routes, summed, over that of the faster ones. One thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from rich.console import Console
from rich.table import Table

from tdasearch import route_work
from tdasearch.cost_model import ROUTES, Constants, Route, Work, constants, device_name
from tdasearch.gradients import Dense, Outer, size_of
from tdasearch.operations import CHUNK_BYTES, inner_products, squared_norms
from tdasearch.projection import CoordinateMask
from tdasearch.rotation import Rotation

WIDTHS = ((64, 64), (128, 128), (384, 128), (128, 512), (512, 512), (1408, 512))
"""Outputs and inputs: of a tiny model, of Pythia-14m, of a Llama of 34M parameters."""
POSITIONS = (16, 64, 128, 256, 512, 1024)
BATCH_TOKENS = 1024
LONG_SECONDS = 0.25
"""A run that takes longer is not repeated; of shorter ones the first warms and does not count."""
CLEAR = 1.2
"""Routes whose times differ by this factor are told apart for sure."""


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one size.

    Attributes:
        operation: Its name.
        size: For people.
        run: Does it by a route.
        count: Counts the work of a route.
    """

    operation: str
    size: str
    run: Callable[[Route], Any]
    count: Callable[[Route], Work]


def cases() -> Iterator[Case]:
    """Yield every operation on every size."""
    for out_dim, in_dim in WIDTHS:
        for positions in POSITIONS:
            num = BATCH_TOKENS // positions
            left, right = (Outer(torch.randn(num, positions, in_dim), torch.randn(num, positions, out_dim)) for _ in range(2))
            one, many = (Dense(torch.randn(number, out_dim, in_dim)) for number in (1, 16))
            size, name = size_of(left), f"{num} x {positions} x ({out_dim}, {in_dim})"

            def products(other: Outer | Dense, left: Outer = left) -> tuple[Callable[[Route], Any], Callable[[Route], Work]]:
                return (
                    lambda route: inner_products(left, other, route=route),
                    lambda route: route_work.inner_products(size_of(left), size_of(other), 4, CHUNK_BYTES, route),
                )

            yield Case("inner products, two batches", name, *products(right))
            yield Case("inner products, one query", name, *products(one))
            yield Case("inner products, 16 queries", name, *products(many))
            yield Case(
                "squared norms",
                name,
                lambda route, left=left: squared_norms(left, route=route),
                lambda route, size=size: route_work.squared_norms(size, 4, route),
            )
            for share, label in ((1, "rotation, whole basis"), (4, "rotation, a quarter")):
                bases = (torch.randn(out_dim, out_dim // share), torch.randn(in_dim, in_dim // share))
                yield Case(
                    label,
                    name,
                    lambda route, left=left, bases=bases: Rotation(torch.float32, route=route)(left, *bases).dense(),
                    lambda route, size=size, share=share: route_work.rotation(
                        size, size.out_dim // share, size.in_dim // share, False, 4, route
                    ),
                )
            mask = CoordinateMask(out_dim, in_dim, dim=256, seed=0)
            yield Case(
                "mask of 256 coordinates",
                name,
                lambda route, left=left, mask=mask: mask(left, route=route),
                lambda route, size=size: route_work.mask(size, 256, 4, route),
            )


def measured(run: Callable[[Route], Any], repeats: int) -> dict[Route, float]:
    """Return the least time of each route, which take turns."""
    seconds: dict[Route, float] = {}
    for repeat in range(repeats + 1):
        for route in ROUTES:
            if repeat and seconds[route] > LONG_SECONDS:
                continue
            started = time.process_time()
            run(route)
            taken = time.process_time() - started
            seconds[route] = taken if repeat <= 1 and taken <= LONG_SECONDS else min(seconds.get(route, taken), taken)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--all", action="store_true", help="print every case too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = constants("cpu", torch.float32)
    console = Console(width=130)
    rows: dict[str, list[tuple[dict[Route, float], dict[Route, float]]]] = {}
    for case in cases():
        predicted = {route: found.seconds(case.count(route)) for route in ROUTES}
        taken = measured(case.run, arguments.repeats)
        rows.setdefault(case.operation, []).append((predicted, taken))
        if arguments.all:
            pairs = "  ".join(f"{route} {predicted[route] * 1e3:8.3f} / {taken[route] * 1e3:8.3f}" for route in ROUTES)
            line = f"{case.operation:27} {case.size:26} {pairs}  {_verdict(predicted, taken)}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    _print(console, rows, found)


def _choice(seconds: dict[Route, float]) -> Route:
    return min(ROUTES, key=lambda route: seconds[route])


def _verdict(predicted: dict[Route, float], taken: dict[Route, float]) -> str:
    lost = taken[_choice(predicted)] / min(taken.values())
    return "" if lost == 1 else f"chose the slower, x {lost:.2f}"


def _print(console: Console, rows: dict[str, list[tuple[dict[Route, float], dict[Route, float]]]], found: Constants) -> None:
    table = Table(
        title=f"{device_name('cpu')}, {torch.get_num_threads()} threads, float32",
        caption=f"a multiply-add {found.large_seconds * 1e12:.0f} ps in a large product, {found.small_seconds * 1e12:.0f} in a "
        f"small one, a byte {found.byte_seconds * 1e12:.0f} ps, a call {found.call_seconds * 1e6:.1f} us",
    )
    for column in ("operation", "predicted/measured", "chosen is faster", "where they differ", "time of the chosen"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    everything = [row for of_it in rows.values() for row in of_it]
    for operation, of_it in (*rows.items(), ("all", everything)):
        ratios = sorted(predicted[route] / taken[route] for predicted, taken in of_it for route in ROUTES)
        right = [_choice(predicted) == _choice(taken) for predicted, taken in of_it]
        clear = [max(taken.values()) >= CLEAR * min(taken.values()) for _, taken in of_it]
        clearly = [one for one, is_clear in zip(right, clear, strict=True) if is_clear]
        chosen = sum(taken[_choice(predicted)] for predicted, taken in of_it)
        table.add_row(
            operation,
            f"{statistics.median(ratios):.2f} ({ratios[len(ratios) // 20]:.2f}-{ratios[-1 - len(ratios) // 20]:.2f})",
            f"{sum(right)} of {len(right)}",
            f"{sum(clearly)} of {len(clearly)}",
            f"x {chosen / sum(min(taken.values()) for _, taken in of_it):.3f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()

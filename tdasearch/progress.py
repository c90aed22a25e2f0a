"""Progress on stderr: a bar with the rate and the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

Step = Callable[[float], None]


@contextmanager
def progress(label: str, *, total: float | None, unit: str, quiet: bool = False, delay: float = 0.0) -> Iterator[Step]:
    """Show how far a long step is.

    Args:
        label: What is being done.
        total: Amount of work; None if it is not known.
        unit: Of the amount, such as "tok".
        quiet: Show nothing.
        delay: Seconds before the first sign, for steps that are usually short.

    Yields:
        A function to call with each amount done.
    """
    terminal = sys.stderr.isatty()
    bar = tqdm(
        desc=label,
        total=total,
        unit=unit,
        unit_scale=True,
        disable=quiet,
        delay=delay,
        dynamic_ncols=True,
        mininterval=0.2 if terminal else 15.0,  # a log file gets a line a quarter of a minute, not ten a second
        file=sys.stderr,
    )
    with bar:
        yield bar.update


def note(message: str, *, quiet: bool = False) -> None:
    """Tell the user, on stderr, what was decided or what went differently than asked."""
    if not quiet:
        tqdm.write(message, file=sys.stderr)

"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_FIELDS_SHOWN = 6


def print_hits(rows: Sequence[Mapping[str, Any]], *, title: str, loss: float, num_targets: int) -> None:
    """Print search rows.

    Args:
        rows: As ``tdasearch search --json`` prints them.
        title: Which end of the ranking.
        loss: The query's loss, nats.
        num_targets: The query's target tokens.
    """
    console = Console()
    if not rows:
        console.print("No document passes the filter.")
        return
    exact = sum(bool(row["rescored"]) for row in rows)
    table = Table(
        title=title, caption=f"query loss {loss:.3f} nats over {num_targets} tokens; {exact} of {len(rows)} scores exact"
    )
    for column, justify in (("#", "right"), ("score", "right"), ("document", "left"), ("metadata", "left"), ("text", "left")):
        table.add_column(column, justify=justify, overflow="fold" if column != "text" else "ellipsis")  # type: ignore[arg-type]
    for row in rows:
        document = str(row["document_id"])
        if row["num_windows"] > 1:
            document += f"\nwindow {row['window'] + 1} of {row['num_windows']}"
        cells = (str(row["rank"]), f"{row['score']:.4g}", document, _metadata(row["metadata"]), snippet(row["text"]))
        table.add_row(*(Text(cell) for cell in cells))  # Text: what documents contain is never read as markup
    console.print(table)


def print_info(described: Mapping[str, Any]) -> None:
    """Print what an index says of itself.

    Args:
        described: As ``Index.info`` returns it.
    """
    plan = described["plan"]
    rows = {
        "documents": f"{described['documents']:,} in {described['windows']:,} windows, {described['tokens']:,} tokens read",
        "state": described["state"],
        "bytes a document": f"{described['bytes_per_document']:,} ({plan['code']}, {plan['sketch_dim']:,} dimensions)",
        "method": f"{described['method']}, {plan['fisher']} Fisher of {plan['fit_documents']:,} documents, "
        f"damping x {plan['damping_scale']}",
        "covers": f"{described['covered_parameters']:,} parameters in {len(plan['modules'])} modules "
        f"({described['covered_share']:.1%} of the model)",
        "model": f"{described['model']['source'] or '(given in memory)'}, {described['model']['dtype']}",
        "windows of": f"{plan['window_tokens']} tokens, every {plan['stride']}",
        "not indexed": f"{described['skipped']} rows skipped, {described['duplicates']} duplicates, "
        f"{described['truncated']} documents cut",
        "filter columns": ", ".join(described["columns"].values()) or "(none)",
    }
    table = Table(title=str(described["path"]), show_header=False)
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    Console().print(table)


def print_costs(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the choices of the cost model; modules of one shape, for which they are the same, as one line.

    Args:
        rows: As ``Index.explain_costs`` returns them.
    """
    console = Console()
    if not rows:
        console.print("No module has an eigenbasis: there is nothing to choose.")
        return
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        alike.setdefault(tuple(value for key, value in row.items() if key != "module"), []).append(row)
    first = rows[0]
    batch = f"{first['num_examples']} x {first['num_positions']} tokens"
    table = Table(
        title=f"Predicted for batches of {batch} on {first['device']}",
        caption="factored: rotate (or pair) the factors, then multiply; dense: multiply, then rotate; * is chosen",
    )
    for column in ("modules", "step", "weight", "kept", "factored", "dense"):
        table.add_column(column, justify="right" if column in ("factored", "dense") else "left", overflow="fold")
    for same in sorted(alike.values(), key=lambda same: (same[0]["step"], -same[0]["dense_seconds"])):
        row = same[0]
        name = row["module"] if len(same) == 1 else f"{row['module']} and {len(same) - 1} alike"
        seconds = (
            f"{row[f'{route}_seconds'] * 1e3:.3g} ms{' *' if row['route'] == route else '  '}" for route in ("factored", "dense")
        )
        sides = (f"{row['out_dim']} x {row['in_dim']}", f"{row['out_rank']} x {row['in_rank']}")
        table.add_row(*(Text(cell) for cell in (name, row["step"], *sides, *seconds)))
    console.print(table)


def _metadata(metadata: Mapping[str, Any]) -> str:
    """One line a field, the first few; all of it is in the JSON."""
    lines = [snippet(f"{key}={value}", characters=60) for key, value in metadata.items()]
    return "\n".join([*lines[:_FIELDS_SHOWN], "..."] if len(lines) > _FIELDS_SHOWN else lines)


def snippet(text: str, *, characters: int = 240) -> str:
    """Return the beginning of a text on one line, with a mark where it was cut."""
    line = " ".join(text.split())
    return line if len(line) <= characters else line[: characters - 3] + "..."

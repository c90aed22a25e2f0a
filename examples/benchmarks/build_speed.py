"""What capturing, encoding and building cost, beside other libraries, in plain forward and backward passes.

    python examples/benchmarks/build_speed.py --peers PYTHON [--model llama34m neox14m] [--documents 32] [--fit-documents 32]
        [--repeats 3] [--json FILE] [--markdown]
    python examples/benchmarks/build_speed.py --without-peers

A plain pass is `model(input_ids=ids, labels=ids).loss.backward()` and `zero_grad()`, gradients of all weights included. Each
figure is a ratio of CPU seconds to it, in the same process, over the same documents of 256 tokens, in batches of 8, one thread:
the median of the repeats, which alternate with plain passes, and their range. A build runs once, over 20 times as many
documents as its fit, between plain passes over a third of its corpus each; what it writes meanwhile is in its encoding. PYTHON
is the interpreter of an environment that has the peers; `peers/` says what each needs. "Recall" is the share of uncompressed
EK-FAC's top 10 that is among the first 2 percent of the codes' ranking, over queries from documents that are not in the corpus,
of a model trained for a few steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pyarrow as pa
import torch
import workload
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tdasearch
from tdasearch.capture import Capture
from tdasearch.curvature import Covariance
from tdasearch.index import Index
from tdasearch.indexer import build as build_module
from tdasearch.indexer.encode import encode_shard
from tdasearch.indexer.job import Job
from tdasearch.indexer.readers import Fields
from tdasearch.progress import note
from tdasearch.records import Content

CORPUS_OVER_FIT = 20
DEFAULT_FIT_DOCUMENTS = 1_000  # the least that build_index fits on where the corpus has them
PLANS = {"default plan": None, "fastest plan": 0.125}  # -> eigenbasis_share; None: the planner's choice
BARS = {"encode, default plan": 0.92, "encode, fastest plan": 0.85, "build, default plan": 1.10}
PEERS = ("dattri_llm", "bergson", "kronfluence")
NUM_QUERIES, QUERY_TOKENS = 32, 64


@dataclass
class Row:
    """One line of the table, of one model.

    Attributes:
        name: What was run.
        ratios: CPU seconds over the plain pass's, a repeat.
        recall: Of the codes, where they were measured.
        parts: Of a build: its parts, which add up to it, and what it would be at a fit of 1,000 documents, computed.
        error: Why there are no figures.
    """

    name: str
    ratios: list[float] = field(default_factory=list)
    recall: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"failed: {self.error}"
        median = statistics.median(self.ratios)
        text = f"{median:.2f}"
        if len(self.ratios) > 1:
            text += f" ({min(self.ratios):.2f}-{max(self.ratios):.2f})"
        if self.name in BARS and median > BARS[self.name]:
            text += ", misses its bar"
        if self.recall:
            text += f"; recall {self.recall['2 percent']:.2f}"
        return text + (": " if self.parts else "") + ", ".join(f"{name} {value:.2f}" for name, value in self.parts.items())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=workload.MODELS, default=list(workload.MODELS))
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter of the environment that has the peers")
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--documents", type=int, default=32, help="documents of each timed pass")
    parser.add_argument(
        "--fit-documents", type=int, default=32, help="documents of the build's fit; its corpus has 20 times these"
    )
    parser.add_argument("--training-batches", type=int, default=50, help="of 8 documents, before anything is measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    arguments = parser.parse_args()
    if bool(arguments.peers) == arguments.without_peers:
        parser.error("expected either --peers PYTHON or --without-peers")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    corpus = workload.Corpus()
    wanted = CORPUS_OVER_FIT * arguments.fit_documents + NUM_QUERIES + workload.BATCH_DOCUMENTS * arguments.training_batches
    if wanted > len(corpus.texts):
        parser.error(
            f"expected documents for corpus, queries and training, {wanted:,} with these options, found {len(corpus.texts):,} in "
            "the standard library: ask for fewer --fit-documents or --training-batches"
        )
    found: dict[str, list[Row]] = {}
    for model in arguments.model:
        found[model] = measure_ours(model, corpus, arguments)
        _write(found, arguments.json)
        for peer in PEERS if arguments.peers else ():
            found[model] += measure_peer(peer, model, arguments)
            _write(found, arguments.json)
    show(found, markdown=arguments.markdown)


def _write(found: dict[str, list[Row]], path: Path | None) -> None:
    if path is not None:
        everything = {name: [asdict(row) for row in rows] for name, rows in found.items()}
        path.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


def measure_ours(name: str, corpus: workload.Corpus, arguments: argparse.Namespace) -> list[Row]:
    """Train a model, build both plans' indexes, time the passes, and measure what the codes find."""
    model, tokenizer = workload.make_model(name), corpus.tokenizer()
    num_documents = CORPUS_OVER_FIT * arguments.fit_documents
    rest = corpus.ids_NT[num_documents:]
    _train(model, rest[NUM_QUERIES : NUM_QUERIES + workload.BATCH_DOCUMENTS * arguments.training_batches])
    documents = [{"id": f"d{number}", "text": text} for number, text in enumerate(corpus.texts[:num_documents])]
    queries = [
        Content(completion=" ".join(text.split(" ")[:QUERY_TOKENS]))
        for text in corpus.texts[num_documents : num_documents + NUM_QUERIES]
    ]
    with tempfile.TemporaryDirectory() as folder:
        note(f"{name}: the builds")
        indexes, rows = _builds(model, tokenizer, documents, corpus.ids_NT[:num_documents], arguments, Path(folder))
        note(f"{name}: the passes")
        passes = _passes(model, corpus.ids_NT[: arguments.documents], indexes, arguments.repeats)
        note(f"{name}: what the codes find")
        recalls = _recalls(indexes, queries, num_documents)
    for row in passes + rows:
        row.recall = recalls.get(row.name.partition(", ")[2], {}) if row.name.startswith("encode") else {}
    return passes + rows


def _train(model: Any, ids_NT: Tensor) -> None:
    """A little training, so that what the codes find is measured on a model that has learned something; no figure's time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch_NT in ids_NT.split(workload.BATCH_DOCUMENTS):
        model(input_ids=batch_NT, labels=batch_NT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _builds(
    model: Any, tokenizer: Any, documents: list[dict[str, str]], ids_NT: Tensor, arguments: argparse.Namespace, folder: Path
) -> tuple[dict[str, Index], list[Row]]:
    thirds = ids_NT.tensor_split(3)
    workload.plain_pass(model, ids_NT[: workload.BATCH_DOCUMENTS])  # warm

    def plain(third: Tensor) -> float:
        return workload.timed(lambda: workload.plain_pass(model, third)) * len(ids_NT) / len(third)

    indexes, rows, before = {}, [], plain(thirds[0])
    for number, (plan, share) in enumerate(PLANS.items()):
        with _split() as parts:
            started = workload.cpu_seconds()
            indexes[plan] = tdasearch.build_index(
                documents,
                model=model,
                tokenizer=tokenizer,
                path=folder / f"{number}.tda",
                eigenbasis_share=share,
                fit_documents=arguments.fit_documents,
                quiet=True,
            )
            parts["whole"] = workload.cpu_seconds() - started
        after = plain(thirds[number + 1])
        rows.append(_build_row(plan, parts, (before + after) / 2, arguments.fit_documents))
        before = after
    return indexes, rows


def _build_row(plan: str, parts: dict[str, float], plain: float, fit_documents: int) -> Row:
    eigen = parts["eigendecompositions"]
    times = max(1.0, DEFAULT_FIT_DOCUMENTS / fit_documents)  # of the fit, the corpus, and all of the work but this part
    seconds = {
        "fit's passes": parts["fit"] - eigen,
        "eigendecompositions": eigen,
        "encoding": parts["encode"],
        "rest": parts["whole"] - parts["fit"] - parts["encode"],
        f"computed for a fit of {DEFAULT_FIT_DOCUMENTS:,}": parts["whole"] - eigen + eigen / times,
    }
    return Row(f"build, {plan}", [parts["whole"] / plain], parts={part: taken / plain for part, taken in seconds.items()})


@contextmanager
def _split() -> Iterator[dict[str, float]]:
    """Sum the CPU seconds of a build's parts while it runs."""
    parts: dict[str, float] = {}

    def clocked(part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        parts[part] = 0.0

        def call(*args: Any, **kwargs: Any) -> Any:
            started = workload.cpu_seconds()
            try:
                return run(*args, **kwargs)
            finally:
                parts[part] += workload.cpu_seconds() - started

        return call

    with ExitStack() as stack:
        for owner, name, part in (
            (build_module, "fit_or_load", "fit"),
            (build_module, "encode_shard", "encode"),
            (Covariance, "eigen", "eigendecompositions"),
        ):
            stack.enter_context(patch.object(owner, name, clocked(part, getattr(owner, name))))
        yield parts


def _recalls(indexes: dict[str, Index], queries: list[Content], num_documents: int) -> dict[str, dict[str, float]]:
    """Of each plan's codes: the share of uncompressed EK-FAC's top 10 among their first 2 percent, and their first 200."""
    exact = indexes["default plan"].search_many(queries, k=10, rescore="all", opponents=False)
    wanted = [{hit.document_id for hit in hits.proponents} for hits in exact]
    sizes = {"2 percent": max(10, num_documents // 50), "200": min(200, num_documents)}
    recalls: dict[str, dict[str, float]] = {}
    for plan, index in indexes.items():
        found = index.search_many(queries, k=max(sizes.values()), rescore=0, opponents=False)
        recalls[plan] = {
            name: statistics.fmean(
                len(ids & {hit.document_id for hit in hits.proponents[:size]}) / len(ids)
                for ids, hits in zip(wanted, found, strict=True)
            )
            for name, size in sizes.items()
        }
    return recalls


def _passes(model: Any, ids_NT: Tensor, indexes: dict[str, Index], repeats: int) -> list[Row]:
    passes: dict[str, Callable[[], None]] = {
        "forward and backward": lambda: workload.plain_pass(model, ids_NT),
        "forward": lambda: workload.plain_pass(model, ids_NT, "forward"),
        "frozen weights": lambda: workload.plain_pass(model, ids_NT, "frozen"),
        "capture alone": lambda: _capture(indexes["default plan"], ids_NT),
    }
    windows = pa.table(
        {
            "document_id": [str(row) for row in range(len(ids_NT))],
            "window": [0] * len(ids_NT),
            "token_ids": ids_NT.tolist(),
            "is_target": [[False] + [True] * (workload.TOKENS - 1)] * len(ids_NT),
        }
    )
    passes |= {f"encode, {plan}": lambda index=index: _encode(index, windows) for plan, index in indexes.items()}
    for run in passes.values():
        run()  # warm
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(repeats):
        for name, run in passes.items():
            seconds[name].append(workload.timed(run))
    plain = seconds["forward and backward"]
    return [Row(name, [one / other for one, other in zip(taken, plain, strict=True)]) for name, taken in seconds.items()]


def _job(index: Index) -> Job:
    return Job(
        [], index.language_model, index.path, Fields(), workload.BATCH_DOCUMENTS * workload.TOKENS, strict=False, quiet=True
    )


def _capture(index: Index, ids_NT: Tensor) -> None:
    language_model = index.language_model
    is_target = [[False] + [True] * (workload.TOKENS - 1)] * workload.BATCH_DOCUMENTS
    with Capture(language_model.model, index.manifest.plan.modules) as capture:
        for batch_NT in ids_NT.split(workload.BATCH_DOCUMENTS):
            batch = language_model.batch(batch_NT.tolist(), is_target[: len(batch_NT)])
            capture.backward(lambda batch=batch: language_model.losses(batch), lambda name, gradient: None)


def _encode(index: Index, windows: pa.Table) -> None:
    plan = index.manifest.plan
    with Capture(index.language_model.model, plan.modules) as capture:
        encode_shard(windows, _job(index), capture, index.encoder, code=plan.code, step=lambda amount: None)


def measure_peer(peer: str, model: str, arguments: argparse.Namespace) -> list[Row]:
    """Run a peer's driver in the peers' environment; a failure is a row that says so."""
    command = [arguments.peers, "-m", f"peers.{peer}", "--model", model]
    command += ["--documents", str(arguments.documents), "--repeats", str(arguments.repeats)]
    folder = Path(__file__).resolve().parent
    note(f"{model}: {peer}")
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    except OSError as error:
        return [Row(peer, error=str(error))]
    sys.stderr.write(ran.stderr[-4000:])
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"peer"')]
    rows = [
        Row(f"{line['peer']}: {line['configuration']}", line.get("ratios", []), error=line.get("error", "")) for line in lines
    ]
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or [""])[-1]
        rows.append(Row(peer, error=f"its driver ended with {ran.returncode}: {last}"))
    return rows


def show(found: dict[str, list[Row]], *, markdown: bool) -> None:
    """Print the table, a column a model."""
    names = list(dict.fromkeys(row.name for rows in found.values() for row in rows))
    cells = [
        [
            name + (f" (bar {BARS[name]:.2f})" if name in BARS else ""),
            *(next((str(row) for row in rows if row.name == name), "") for rows in found.values()),
        ]
        for name in names
    ]
    if markdown:
        print("\n".join("| " + " | ".join(line) + " |" for line in [["", *found], ["---"] * (1 + len(found)), *cells]))
        return
    table = Table(title="CPU time over a plain forward and backward pass's")
    for column in ("", *found):
        table.add_column(column)
    for line in cells:
        table.add_row(*line)
    Console().print(table)


if __name__ == "__main__":
    main()

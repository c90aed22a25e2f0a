"""Whether a build's memory grows with the corpus: peak memory of builds over ever more documents.

    python examples/benchmarks/build_memory.py [--documents 1000 10000 100000] [--fit-documents 1000]

Each build runs in a process of its own over made-up documents of 8 to 24 tokens, with a GPT-2 of one layer and width 32, so that
little but the pipeline's own memory is seen. Printed is each process's peak resident memory, imports included, what it is over
the first build's, and how much of it the build took, over what was resident when it began.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORDS = 500


def main() -> None:
    """Run the builds, or, in a process of its own, one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--fit-documents", type=int, default=1_000)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_build(arguments.documents[0], arguments.fit_documents)))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _print([_in_a_process(num_documents, arguments.fit_documents) for num_documents in arguments.documents])


def _in_a_process(num_documents: int, fit_documents: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", "--documents", str(num_documents), "--fit-documents", str(fit_documents)]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    print(found, file=sys.stderr)
    return found


def _build(num_documents: int, fit_documents: int) -> dict[str, Any]:
    import tdasearch

    model, tokenizer = _model()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "documents.jsonl"
        _write_corpus(corpus, num_documents)
        _import_all()
        before, started, cpu = _memory("VmRSS"), time.perf_counter(), time.process_time()
        tdasearch.build_index(
            corpus, model=model, tokenizer=tokenizer, path=Path(folder) / "x.tda", fit_documents=fit_documents, quiet=True
        )
        return {
            "documents": num_documents,
            "before_bytes": before,
            "peak_bytes": _memory("VmHWM"),
            "wall_seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu,
        }


def _memory(name: str) -> int:
    """VmRSS or VmHWM; not ``ru_maxrss``, which a process inherits from the one that started it."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("expected Linux's /proc/self/status")


def _import_all() -> None:
    import tdasearch.indexer.build  # noqa: F401


def _model() -> tuple[Any, Any]:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=0)
    return GPT2LMHeadModel(config), PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w0")


def _write_corpus(path: Path, num_documents: int) -> None:
    chance = random.Random(0)
    with path.open("w", encoding="ascii") as file:
        for number in range(num_documents):
            text = " ".join(f"w{chance.randrange(WORDS)}" for _ in range(chance.randint(8, 24)))
            file.write(json.dumps({"id": f"d{number}", "text": text, "group": number % 7}) + "\n")


def _print(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Peak memory of a build")
    for column in ("documents", "peak MiB", "over the first", "of it the build", "wall s", "CPU s"):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(
            f"{one['documents']:,}",
            f"{one['peak_bytes'] / 2**20:,.0f}",
            f"{one['peak_bytes'] / found[0]['peak_bytes']:.3f}",
            f"{(one['peak_bytes'] - one['before_bytes']) / 2**20:,.0f}",
            f"{one['wall_seconds']:.0f}",
            f"{one['cpu_seconds']:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()

"""What capturing and encoding a document costs, in plain forward and backward passes (weight gradients included).

    python examples/benchmarks/encode_cost.py [--documents 16] [--tokens 256] [--repeats 5]

The model is a Llama of 34M parameters built from its configuration (8 layers, hidden 512, vocabulary 8,192), the documents are
random tokens, the factors random: only the time is real. Each repeat runs the plain pass and each other pass once, one after
another; printed is the median ratio of process CPU time, and its range. One thread (set OMP_NUM_THREADS for another number).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from tdasearch.capture import Capture
from tdasearch.codes import sketch_dim_for
from tdasearch.curvature import ModuleFactors
from tdasearch.encoder import Encoder
from tdasearch.language_model import Batch, LanguageModel
from tdasearch.modules import Coverage, choose_modules

SHARES = (0.5, 0.25, 0.125)
BATCH_TOKENS = 2048


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            tie_word_embeddings=True,
        )
    )
    language_model = LanguageModel(model, None)
    coverage = choose_modules(model)
    batches = _batches(language_model, arguments.documents, arguments.tokens)
    passes: dict[str, Callable[[], None]] = {
        "plain": partial(_plain, language_model, batches),
        "frozen weights, nothing captured": partial(_frozen, language_model, coverage, batches),
    }
    for share in SHARES:
        encoder = Encoder(_factors(coverage), eigenbasis_share=share, sketch_dim=sketch_dim_for("1bit", 1024), seed=0)
        passes[f"encode, {share:g} of each eigenbasis"] = partial(_encode, language_model, coverage, encoder, batches)
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for run in passes.values():
        run()  # warm
    for _ in range(arguments.repeats):
        for name, run in passes.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    table = Table(title=f"{arguments.documents} documents of {arguments.tokens} tokens, CPU time over a plain pass's")
    for column in ("pass", "median", "range"):
        table.add_column(column, justify="left" if column == "pass" else "right")
    for name, taken in seconds.items():
        ratios = [one / plain for one, plain in zip(taken, seconds["plain"], strict=True)]
        table.add_row(name, f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}")
    Console().print(table)


def _batches(language_model: LanguageModel, num_documents: int, num_tokens: int) -> list[Batch]:
    token_ids = torch.randint(0, 8192, (num_documents, num_tokens)).tolist()
    is_target = [[False] + [True] * (num_tokens - 1)] * num_documents
    size = max(1, BATCH_TOKENS // num_tokens)
    return [
        language_model.batch(token_ids[start : start + size], is_target[start : start + size])
        for start in range(0, num_documents, size)
    ]


def _factors(coverage: Coverage) -> dict[str, ModuleFactors]:
    made: dict[str, torch.Tensor] = {}

    def orthogonal(key: str, dim: int) -> torch.Tensor:
        if key not in made:
            made[key] = torch.linalg.qr(torch.randn(dim, dim))[0].contiguous()
        return made[key]

    factors = {}
    for linear in coverage.parts:
        reads = linear.name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
        factors[linear.name] = ModuleFactors(
            activation_eigenvectors=orthogonal(f"reads {reads}", linear.in_dim),
            gradient_eigenvectors=orthogonal(linear.name, linear.out_dim),
            eigenvalues=torch.rand(linear.out_dim, linear.in_dim),
            damping=0.1,
        )
    return factors


def _plain(language_model: LanguageModel, batches: list[Batch]) -> None:
    for batch in batches:
        language_model.losses(batch).sum().backward()
        language_model.model.zero_grad()


def _frozen(language_model: LanguageModel, coverage: Coverage, batches: list[Batch]) -> None:
    with Capture(language_model.model, coverage.names) as capture:
        for batch in batches:
            capture.backward(partial(language_model.losses, batch), lambda *_: None)


def _encode(language_model: LanguageModel, coverage: Coverage, encoder: Encoder, batches: list[Batch]) -> None:
    with Capture(language_model.model, coverage.names) as capture:
        for batch in batches:
            encoder.encode(capture, partial(language_model.losses, batch))


if __name__ == "__main__":
    main()

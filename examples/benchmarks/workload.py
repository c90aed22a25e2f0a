"""The work that build_speed.py and the peers share: two models, one corpus of real text, one clock. Imports no tdasearch.

The corpus is the Python standard library's source, as words, in documents of 256; its 8,190 most frequent words are the
vocabulary. So every interpreter has it, and a text of 256 words is a document of 256 tokens.
"""

from __future__ import annotations

import json
import random
import re
import resource
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEED = 20261201
VOCABULARY = 8192
TOKENS = 256
BATCH_DOCUMENTS = 8
MODELS = ("llama34m", "neox14m")
LAYERS = {"llama34m": r"layers\.\d+\.(self_attn|mlp)\.", "neox14m": r"layers\.\d+\.(attention|mlp)\."}
"""Patterns of the linear maps in the transformer blocks, without embedding and head: what everyone covers."""
NUM_QUERIES, QUERY_TOKENS = 16, 64
"""Queries of the peers that score as they go."""


def make_model(name: str) -> Any:
    """Build a model of seeded random weights, float32.

    Args:
        name: "llama34m" (8 layers, hidden 512, MLP 1,408) or "neox14m" (Pythia-14m's blocks: 6 layers, hidden 128).

    Returns:
        The transformers model, in evaluation mode.
    """
    import transformers

    torch.manual_seed(SEED)
    shared = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048, "use_cache": False}
    if name == "llama34m":
        config = transformers.LlamaConfig(
            hidden_size=512,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            intermediate_size=1408,
            tie_word_embeddings=False,
            **shared,
        )
        return transformers.LlamaForCausalLM(config).float().eval()
    config = transformers.GPTNeoXConfig(
        hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512, **shared
    )
    return transformers.GPTNeoXForCausalLM(config).float().eval()


class Corpus:
    """The standard library in documents of 256 words, each once, in a seeded order.

    Attributes:
        vocabulary: Words by token id; 0 is every other word, 1 ends a text.
        texts: The documents' words, joined by spaces.
        ids_NT: [N, 256] int64, their tokens.
    """

    def __init__(self) -> None:
        files = [re.findall(r"\w+|[^\w\s]", text) for text in _sources()]
        counts = Counter(word for words in files for word in words)
        frequent = sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY - 2]
        self.vocabulary = ["<unk>", "<eos>", *frequent]
        known = {word: token_id for token_id, word in enumerate(self.vocabulary)}
        runs = [words[start : start + TOKENS] for words in files for start in range(0, len(words) - TOKENS + 1, TOKENS)]
        texts = {" ".join(word if word in known else "<unk>" for word in run): None for run in runs}
        self.texts = list(texts)
        random.Random(SEED).shuffle(self.texts)
        self.ids_NT = torch.tensor([[known[word] for word in text.split(" ")] for text in self.texts])

    def tokenizer(self) -> Any:
        """Make the tokenizer of these texts: words at spaces."""
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        known = {word: token_id for token_id, word in enumerate(self.vocabulary)}
        core = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(
            tokenizer_object=core, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>", model_max_length=2048
        )


def _sources() -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.relative_to(folder).parts):
            yield path.read_text(encoding="utf-8", errors="replace")


class Documents(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Documents as transformers' collators expect them.

    Args:
        ids_NT: [N, T].
    """

    def __init__(self, ids_NT: Tensor) -> None:
        self.ids_NT = ids_NT

    def __len__(self) -> int:
        return len(self.ids_NT)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = self.ids_NT[row]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def plain_pass(model: Any, ids_NT: Tensor, kind: str = "forward and backward") -> None:
    """Run a model over documents, in batches of 8.

    Args:
        model: A transformers model.
        ids_NT: [N, T].
        kind: "forward and backward" (the weights' gradients too), "forward", or "frozen" (gradients of activations only, from
            the embedding's output on).
    """
    model.requires_grad_(kind == "forward and backward")
    handle = None
    if kind == "frozen":
        handle = model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    try:
        for batch_NT in ids_NT.split(BATCH_DOCUMENTS):
            with torch.set_grad_enabled(kind != "forward"):
                loss = model(input_ids=batch_NT, labels=batch_NT).loss
                if kind != "forward":
                    loss.backward()
            model.zero_grad()
    finally:
        if handle is not None:
            handle.remove()
        model.requires_grad_(True)


def cpu_seconds() -> float:
    """CPU seconds of this process, all its threads, and of the processes that it started and that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(run: Callable[[], object]) -> float:
    """Run something.

    Args:
        run: What.

    Returns:
        The CPU seconds that it took.
    """
    started = cpu_seconds()
    run()
    return cpu_seconds() - started


def report_peer(peer: str, configuration: str, make: Callable[[], Callable[[], object]], arguments: Any, corpus: Corpus) -> None:
    """Measure one pass of a peer in plain passes of the same process, one after the other in turn, and print a line of JSON.

    Args:
        peer: Its name.
        configuration: What it does.
        make: Sets the peer up (not timed) and returns its pass.
        arguments: ``model``, ``documents`` and ``repeats``.
        corpus: The corpus, whose first documents both run over.
    """
    row: dict[str, Any] = {"peer": peer, "configuration": configuration, "model": arguments.model}
    try:
        ids_NT, model, run = corpus.ids_NT[: arguments.documents], make_model(arguments.model), make()
        plain_pass(model, ids_NT)  # warm
        pairs = []
        for _ in range(arguments.repeats):
            pairs.append((timed(lambda: plain_pass(model, ids_NT)), timed(run)))
        row["ratios"] = [seconds / plain for plain, seconds in pairs]
        row["plain_seconds"] = [plain for plain, _ in pairs]
    except Exception as error:  # a peer that fails is a row that says so
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    print(json.dumps(row), flush=True)


def peer_arguments(description: str | None) -> Any:
    """Parse a driver's options, and keep to one thread."""
    import argparse

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    torch.set_num_threads(1)
    return parser.parse_args()

"""A brief fine-tuning: the linear maps of the upper blocks, the very weights that the demo's index covers.

The blocks below never change, so their output is computed once and each epoch runs the upper blocks only.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tdasearch.progress import progress

FIRST_BLOCK = 22
NUM_EPOCHS = 6
LEARNING_RATE = 8e-4
BATCH_DOCUMENTS = 8
WARM_UP_STEPS = 10


def run(model_path: Path, texts: Sequence[str], out_path: Path, *, seed: int, quiet: bool = False) -> Path:
    """Fine-tune the model on the texts, with the loss on every token.

    Args:
        model_path: The model's folder.
        texts: The documents.
        out_path: Where to write the result; replaced if it is there.
        seed: Of the order of the documents.
        quiet: Show no progress.

    Returns:
        ``out_path``.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    blocks = model.model.layers
    trained = [part.weight for part in blocks[FIRST_BLOCK:].modules() if isinstance(part, torch.nn.Linear)]
    token_ids = [torch.tensor(tokenizer(text).input_ids) for text in texts]
    num_tokens = sum(map(len, token_ids))
    with progress("fine-tune", total=(NUM_EPOCHS + 1) * num_tokens, unit="tok", quiet=quiet) as step:
        hidden = _below(model, token_ids, step)
        for weight in trained:
            weight.requires_grad_(True)
        model.model.layers = blocks[FIRST_BLOCK:]
        _train(model, trained, token_ids, hidden, seed=seed, step=step)
        model.model.layers = blocks
    shutil.rmtree(out_path, ignore_errors=True)
    model.save_pretrained(out_path)
    tokenizer.save_pretrained(out_path)
    return out_path


def _below(model: Any, token_ids: Sequence[Tensor], step: Any) -> list[Tensor]:
    """What the first trained block reads of each document: [T, hidden]."""
    hidden: list[Tensor] = [torch.empty(0)] * len(token_ids)
    order = sorted(range(len(token_ids)), key=lambda row: len(token_ids[row]))
    with torch.no_grad():
        for start in range(0, len(order), 2 * BATCH_DOCUMENTS):
            rows = order[start : start + 2 * BATCH_DOCUMENTS]
            ids = pad_sequence([token_ids[row] for row in rows], batch_first=True)
            is_token = pad_sequence([torch.ones_like(token_ids[row]) for row in rows], batch_first=True)
            # hidden_states[b] is what block b reads.
            states = model.model(ids, attention_mask=is_token, use_cache=False, output_hidden_states=True).hidden_states
            for row, state in zip(rows, states[FIRST_BLOCK], strict=True):
                hidden[row] = state[: len(token_ids[row])].clone()
            step(int(is_token.sum()))
    return hidden


def _train(
    model: Any, trained: Sequence[Tensor], token_ids: Sequence[Tensor], hidden: Sequence[Tensor], *, seed: int, step: Any
) -> None:
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    batches = [batch for epoch in range(NUM_EPOCHS) for batch in _batches(token_ids, random.Random(f"{seed} {epoch}"))]
    for number, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (number + 1) / WARM_UP_STEPS) * max(0.05, 1 - number / len(batches))
        ids = pad_sequence([token_ids[row] for row in batch], batch_first=True)
        is_token = pad_sequence([torch.ones_like(token_ids[row]) for row in batch], batch_first=True)
        below = pad_sequence([hidden[row] for row in batch], batch_first=True)
        output = model.model(inputs_embeds=below, attention_mask=is_token, use_cache=False).last_hidden_state
        is_target = is_token[:, 1:] > 0
        loss = torch.nn.functional.cross_entropy(model.lm_head(output[:, :-1][is_target]), ids[:, 1:][is_target])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step(int(is_token.sum()))


def _batches(token_ids: Sequence[Tensor], draw: random.Random) -> list[list[int]]:
    """A random order, in batches of documents of similar length."""
    order = draw.sample(range(len(token_ids)), len(token_ids))
    chunk = 6 * BATCH_DOCUMENTS
    batches = []
    for start in range(0, len(order), chunk):
        rows = sorted(order[start : start + chunk], key=lambda row: len(token_ids[row]))
        batches += [rows[first : first + BATCH_DOCUMENTS] for first in range(0, len(rows), BATCH_DOCUMENTS)]
    draw.shuffle(batches)
    return batches

"""Two processes on the CPU, for the tests of training on several."""

import os
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tdasearch import CaptureCallback, capture_training
from tests.test_trainer import documents_of, trainer
from tests.test_training import IGNORED, batch_of, dense, without_dropout

NUM_RANKS = 2
DOCUMENTS = 8  # of a step, over all ranks and micro-batches


RUNS = (
    ("ddp", "gpt2", None, "model"),
    ("ddp", "gpt2", None, "wrapper"),
    ("ddp", "llama", "not reentrant", "model"),
    ("ddp", "llama", "not reentrant", None),
    ("ddp", "llama", None, "every kind"),
    ("fsdp2", "llama", None, "every kind"),
    ("fsdp2", "gpt2", None, "model"),
    ("fsdp2", "llama", "not reentrant", "model"),
    ("fsdp2", "llama", "not reentrant", None),
    ("fsdp2", "llama", "reentrant", "model"),
)
"""How the model is wrapped, its kind, checkpointing, and what is given to the capture; None: nothing is captured."""


def file_of(path, run, rank):
    return Path(path) / f"{'-'.join(map(str, run))}-{rank}.pt".replace(" ", "_")


def run_everything(path):
    """Do all runs, in the same two processes: to start them takes longer than to run them."""
    torch.multiprocessing.spawn(_rank, (str(path),), nprocs=NUM_RANKS)


def _rank(rank, path):
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="localhost", MASTER_PORT="0")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{path}/rendezvous", rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=300)
    )
    try:
        for run in RUNS:
            torch.save(train(rank, *run), file_of(path, run, rank))
        torch.save(train_in_trainer(path), file_of(path, ("trainer",), rank))
    finally:
        distributed.destroy_process_group()


def wrapped(model, how):
    """Return what the loop calls; the model itself is sharded in place by FSDP2."""
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for block in model.model.layers if hasattr(model, "model") else model.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(rank, how, kind, checkpointing, given):
    """Two steps of two micro-batches of two documents a rank; returns what was captured and the weights at the end."""
    model, tokenizer = without_dropout(kind, torch.float32 if kind == "llama" else torch.float64)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    called = wrapped(model, how)
    optimizer = torch.optim.SGD(called.parameters(), lr=0.05)
    found, documents = [], []

    def loop():
        for step in range(2):
            for micro in range(2):
                start = step * DOCUMENTS + 2 * (NUM_RANKS * micro + rank)
                inputs, token_ids = batch_of(tokenizer, start, 2)
                documents.append(token_ids)
                if how == "ddp":
                    called.require_backward_grad_sync = micro == 1
                else:
                    called.set_requires_gradient_sync(micro == 1)
                num_targets = (inputs["labels"][:, 1:] != IGNORED).sum()
                distributed.all_reduce(num_targets)
                logits = called(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits
                losses = nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
                )
                (losses * NUM_RANKS / num_targets / 2).backward()
            optimizer.step()
            optimizer.zero_grad()

    if given is not None:
        more = {"modules": ["*"], "kinds": ("linear", "embedding", "norm")} if given == "every kind" else {}
        with capture_training(called if given == "wrapper" else model, found.append, **more):
            loop()
    else:
        loop()
    weights = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in model.state_dict().items()}
    return [(batch.number, ids, dense(batch)) for batch, ids in zip(found, documents, strict=given is not None)], weights


def train_in_trainer(path):
    """A step of transformers' Trainer over DDP; returns what was captured, with the documents."""
    model, tokenizer = without_dropout("llama", torch.float32)
    found = []
    options = {"learning_rate": 0.0, "max_steps": 1, "ddp_backend": "gloo"}
    made = trainer(model, tokenizer, path, [CaptureCallback(found.append)], **options)
    made.train()
    assert made.args.world_size == NUM_RANKS
    return [(documents_of(batch), dense(batch)) for batch in found]

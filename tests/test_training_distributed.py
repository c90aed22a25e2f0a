"""Training on two processes: what the ranks capture, taken together, is what one process captures."""

import pytest
import torch

from tests import distributed, models
from tests.test_training import assert_exact, without_dropout


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    distributed.run_everything(path)

    def load(*run):
        files = [distributed.file_of(path, run, rank) for rank in range(distributed.NUM_RANKS)]
        return [torch.load(file, weights_only=True) for file in files]

    return load


@pytest.mark.parametrize("run", [run for run in distributed.RUNS if run[3] in ("model", "wrapper")])
def test_the_ranks_together_capture_what_one_process_does(of_ranks, run):
    ranks, kind = of_ranks(*run), run[1]
    model, tokenizer = without_dropout(kind, torch.float32 if kind == "llama" else torch.float64)
    texts = models.sentences(2 * distributed.DOCUMENTS)
    assert sum(len(batches) for batches, _ in ranks) == 8
    seen = []
    for batches, _ in ranks:
        for number, token_ids, gradients in batches:
            seen += token_ids
            if number < 2:  # of the first step: the weights are those of the model at the start
                found = {name.removeprefix("module."): gradient for name, gradient in gradients.items()}
                assert_exact(found, model, token_ids, 1e-4 if kind == "llama" else 1e-9)
    assert sorted(seen) == sorted(tokenizer(text).input_ids for text in texts)
    one_step_later = single_process_step(model, tokenizer)
    for batches, _ in ranks:
        for number, token_ids, gradients in batches:
            if number >= 2:
                found = {name.removeprefix("module."): gradient for name, gradient in gradients.items()}
                assert_exact(found, one_step_later, token_ids, 1e-3 if kind == "llama" else 1e-8)


def single_process_step(model, tokenizer):
    """One process's first step over all documents of the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    token_ids = [tokenizer(text).input_ids for text in models.sentences(distributed.DOCUMENTS)]
    for half in (token_ids[:4], token_ids[4:]):
        num_targets = sum(len(ids) - 1 for ids in half)
        for ids in half:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")
            (loss / num_targets / 2).backward()
    optimizer.step()
    return model


def test_tables_and_norms_of_sharded_weights(of_ranks):
    for (whole, _), (sharded, _) in zip(*(of_ranks(how, "llama", None, "every kind") for how in ("ddp", "fsdp2")), strict=True):
        for (_, _, expected), (_, _, found) in zip(whole, sharded, strict=True):
            assert {"model.norm", "model.embed_tokens", "lm_head"} < set(found) == set(expected)
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_training_is_undisturbed(of_ranks, how):
    watched, alone = (of_ranks(how, "llama", "not reentrant", given) for given in ("model", None))
    for (_, weights), (_, expected) in zip(watched, alone, strict=True):
        assert all(torch.equal(expected[name], value) for name, value in weights.items())


def test_the_trainer_on_two_processes(of_ranks):
    model, tokenizer = without_dropout("llama", torch.float32)
    seen = []
    for documents, gradients in [batch for batches in of_ranks("trainer") for batch in batches]:
        seen += documents
        assert_exact(gradients, model, documents, 1e-4)
    texts = [tokenizer(text).input_ids for text in models.sentences(10)]
    assert len(seen) == len({tuple(ids) for ids in seen}) == 8
    assert all(ids in texts for ids in seen)

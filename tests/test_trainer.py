"""Capture in real trainers: transformers' Trainer and TRL's SFTTrainer."""

import copy

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from tdasearch import CaptureCallback
from tdasearch.errors import CaptureError
from tests import models
from tests.test_training import IGNORED, assert_exact, dense, without_dropout

QUIET = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}


def corpus(tokenizer, num=10):
    token_ids = [tokenizer(text).input_ids for text in models.sentences(num)]
    return Dataset.from_dict({"input_ids": token_ids, "labels": token_ids})


def documents_of(batch):
    """The token ids of each example of a batch, read off what the model was called with."""
    if batch.segments is not None:
        places = zip(batch.segments.row_S, batch.segments.start_S, batch.segments.length_S, strict=True)
        return [batch.inputs["input_ids"][row, start : start + length].tolist() for row, start, length in places]
    masks = batch.inputs["attention_mask"].bool()
    return [ids[mask].tolist() for ids, mask in zip(batch.inputs["input_ids"], masks, strict=True)]


def trainer(model, tokenizer, path, callbacks, **options):
    tokenizer.pad_token = tokenizer.pad_token or models.EOS
    arguments = TrainingArguments(
        output_dir=str(path),
        **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "seed": 5, **QUIET, **options},
    )
    collate = DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=IGNORED)
    data = corpus(tokenizer)
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collate, callbacks=callbacks)


def sft_trainer(model, tokenizer, path, callbacks, **options):
    tokenizer.pad_token = tokenizer.pad_token or models.EOS
    arguments = SFTConfig(
        output_dir=str(path),
        **{
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 2,
            "max_steps": 2,
            "max_length": 60,
            "gradient_checkpointing": False,
            "bf16": False,
            **QUIET,
            **options,
        },
    )
    data = corpus(tokenizer).remove_columns("labels")
    return SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=callbacks)


MAKERS = {"transformers": trainer, "trl": sft_trainer}


@pytest.mark.parametrize(
    ("maker", "options"),
    [
        ("transformers", {}),
        ("transformers", {"average_tokens_across_devices": False, "gradient_accumulation_steps": 3}),
        ("transformers", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ("transformers", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        ("transformers", {"bf16": True}),
        ("trl", {}),
        ("trl", {"gradient_checkpointing": True}),
        ("trl", {"packing": True}),
        ("trl", {"padding_free": True, "max_length": None}),
        ("trl", {"bf16": True}),
    ],
)
def test_every_micro_batch_has_the_gradients_of_its_documents(tmp_path, maker, options):
    model, tokenizer = without_dropout("llama", torch.float32)
    original, found, steps = copy.deepcopy(model), [], []

    def on_batch(batch):
        found.append(batch)
        steps.append(callback.state.global_step)

    callback = CaptureCallback(on_batch, modules=["*layers.1.mlp.*", "*.0.self_attn.q_proj"])
    made = MAKERS[maker](model, tokenizer, tmp_path, [callback], learning_rate=0.0, **options)
    made.train()
    assert steps == sorted(steps)
    assert set(steps) == set(range(made.args.max_steps))
    assert max(steps.count(step) for step in set(steps)) == (1 if "packing" in options else made.args.gradient_accumulation_steps)
    assert len(callback.capture.layers) == 4
    texts = {tuple(row["input_ids"]) for row in corpus(tokenizer)}
    for batch in found:
        documents = documents_of(batch)
        assert {tuple(ids) for ids in documents} <= texts
        assert len(documents) == batch.num_examples
        assert_exact(dense(batch), original, documents, 0.15 if options.get("bf16") else 1e-4)
    if maker == "trl" and {"packing", "padding_free"} & set(options):
        assert max(batch.num_examples for batch in found) > 1
        assert all(batch.segments is not None for batch in found)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("bf16", [False, True])
def test_training_is_undisturbed(tmp_path, maker, bf16):
    weights = []
    for callbacks in ([], [CaptureCallback(lambda batch: None)]):
        model, tokenizer = models.tiny("gpt2")  # with dropout
        made = MAKERS[maker](model, tokenizer, tmp_path, callbacks, learning_rate=0.01, bf16=bf16)
        if maker == "transformers":
            made.args.eval_strategy, made.args.eval_steps = "steps", 1
        made.train()
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())
    initial = models.tiny("gpt2")[0].state_dict()
    assert not torch.equal(initial["transformer.h.0.mlp.c_fc.weight"], weights[0]["transformer.h.0.mlp.c_fc.weight"])


def test_a_loss_that_is_no_cross_entropy_is_refused_and_the_model_is_left_alone(tmp_path):
    model, tokenizer = without_dropout("llama", torch.float32)
    callback = CaptureCallback(lambda batch: None)
    made = trainer(model, tokenizer, tmp_path, [callback], label_smoothing_factor=0.1)
    with pytest.raises(CaptureError, match="give loss_scale"):
        made.train()
    callback.close()
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    dft = CaptureCallback(lambda batch: None)
    made = sft_trainer(model, tokenizer, tmp_path, [dft], loss_type="dft")
    with pytest.raises(CaptureError, match="weighted differently"):
        made.train()
    dft.close()
    compiled = CaptureCallback(lambda batch: None)
    with pytest.raises(CaptureError, match="torch_compile=False"):
        compiled.on_train_begin(TrainingArguments(str(tmp_path), torch_compile=True, **QUIET), None, None, model=model)


def test_a_callback_can_be_used_again(tmp_path):
    model, tokenizer = without_dropout("llama", torch.float32)
    found = []
    callback = CaptureCallback(found.append)
    made = trainer(model, tokenizer, tmp_path, [callback], max_steps=1)
    made.train()
    made.train()
    assert [batch.number for batch in found] == [0, 1, 0, 1]

"""Tiny language models and a tokenizer for the tests: built in code, seeded, never downloaded.

Every shape is chosen so that a mistake shows: widths differ (a transpose cannot hide), every bias and norm weight is random (a
bias left out cannot hide), dropout is on in the configuration (a forgotten ``eval()`` cannot hide), and weights are large enough
that gradients differ between documents.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as tokenizer_models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

KINDS = ("gpt2", "llama", "qwen2")
VOCABULARY = 300
MAX_TOKENS = 64
BOS = "<s>"
EOS = "<|endoftext|>"

_SUBJECTS = ("The old fox", "A river", "My teacher", "The capital of France", "Nobody", "The red engine", "Her cat", "Rain")
_VERBS = ("sees", "was", "never finds", "counts", "sings to", "follows", "broke", "returns with")
_OBJECTS = ("seven stones", "the sea", "Paris", "a quiet house", "it", "42 letters", "the moon again", "an answer")
_ENDINGS = (".", "!", "?", " in winter.", ", they say.", " because of the wind.", " and then sleeps.", "; so it goes.")


def sentences(num_documents: int, *, seed: int = 0) -> list[str]:
    """Distinct documents of 5 to 40 tokens of ``tokenizer()``, the same for the same arguments.

    Args:
        num_documents: How many, up to a few hundred.
        seed: Another seed gives other documents.

    Returns:
        The texts. Their first ones do not depend on ``num_documents``.
    """
    generator = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < num_documents:
        subject, verb, end = generator.choice(_SUBJECTS), generator.choice(_VERBS), generator.choice(_ENDINGS)
        words = f"{subject} {verb} {generator.choice(_OBJECTS)}{end}"
        short = f"{verb} {generator.randrange(100)}{end[:1]}"
        found[generator.choice((words, words, short))] = None
    return list(found)


def tokenizer(kind: str = "gpt2", *, bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 300 tokens that can spell every text, equal to what ``AutoTokenizer`` reads back.

    Args:
        kind: One of ``KINDS``. ``qwen2`` has Qwen2's class, as ``AutoTokenizer`` loads no other for such a model: it normalises
            to NFC, splits numbers into digits and has a padding token. The others leave texts as they are and have none.
        bos: Put ``<s>`` before every text, as Llama's does. Both variants have the same vocabulary.

    Returns:
        The tokenizer. It has an end token, which it does not add.
    """
    core = Tokenizer(tokenizer_models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*_SUBJECTS, *_VERBS, *_OBJECTS, *_ENDINGS], trainer)
    first = BOS if bos else None
    if kind == "qwen2":
        bpe = json.loads(core.to_str())["model"]
        merges = [tuple(pair) for pair in bpe["merges"]]
        made = Qwen2Tokenizer(vocab=bpe["vocab"], merges=merges, bos_token=first, eos_token=EOS, model_max_length=MAX_TOKENS)
    else:
        made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=first, eos_token=EOS, model_max_length=MAX_TOKENS)
    start = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, core.token_to_id(BOS))])
    offsets = processors.ByteLevel(trim_offsets=False)
    made.backend_tokenizer.post_processor = processors.Sequence([offsets, start]) if bos else offsets
    return made


def _untrained(kind: str) -> PreTrainedModel:
    """Return the model of one kind, with its own initialisation at fifteen times the usual scale."""
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=MAX_TOKENS,
                n_embd=24,
                n_inner=40,
                n_layer=2,
                n_head=2,
                initializer_range=0.3,
                resid_pdrop=0.1,
                embd_pdrop=0.1,
                attn_pdrop=0.1,
                bos_token_id=None,
                eos_token_id=1,
            )
        )
    config_class, model_class = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[kind]
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.3,
        attention_dropout=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
    )
    return model_class(config)


def tiny(kind: str, *, seed: int = 0, bos: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A model of 2 layers in float32 and its tokenizer, in memory.

    Args:
        kind: ``gpt2`` (Conv1D with biases, learned positions, tied head), ``llama`` (Linear without biases, grouped keys and
            values, untied head) or ``qwen2`` (Llama's shape, with biases on q, k and v).
        seed: Of the weights.
        bos: Give it the tokenizer that puts ``<s>`` before every text.

    Returns:
        The model, in *training* mode as a model built from a configuration is, and the tokenizer.

    Raises:
        ValueError: If the kind is none of ``KINDS``.
    """
    if kind not in KINDS:
        raise ValueError(f"expected one of {KINDS}, found {kind!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _untrained(kind).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model.train(), tokenizer(kind, bos=bos)


def save_tiny(kind: str, path: str | Path, *, seed: int = 0, bos: bool = False) -> Path:
    """Write ``tiny(kind)`` to a folder as ``from_pretrained`` reads it (safetensors).

    Args:
        kind: One of ``KINDS``.
        path: The folder; made if it is not there.
        seed: Of the weights.
        bos: Give it the tokenizer that puts ``<s>`` before every text.

    Returns:
        The folder.
    """
    model, its_tokenizer = tiny(kind, seed=seed, bos=bos)
    model.save_pretrained(path)
    its_tokenizer.save_pretrained(path)
    return Path(path)

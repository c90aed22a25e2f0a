"""Tiny models of many families, each with a batch and the loss of every example, built in code and seeded."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from torch.nn import functional as F

VOCABULARY = 60
LENGTHS = (9, 5, 7)


@dataclass
class Case:
    """A model, and what to run: ``losses(model, rows)`` runs those rows of the batch alone, without their padding."""

    model: nn.Module
    losses: Callable[[nn.Module, list[int]], torch.Tensor]
    left_out: tuple[str, ...] = ()  # modules that no example has for itself


def _llama_like(prefix, config=None, **options):
    config_class = getattr(transformers, config or f"{prefix}Config")
    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config = config_class(**{**sizes, **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.config._experts_implementation = "eager"  # the grouped kernel has no float64
    return model


def _gpt2():
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def _bloom():
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2)
    return transformers.BloomForCausalLM(config)


def _opt():
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=16, word_embed_proj_dim=12, ffn_dim=28, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def _tokens(generator=7):
    """[N, T] tokens, padded on the right with 0, and which are tokens."""
    torch.manual_seed(generator)
    ids_NT = torch.randint(3, VOCABULARY, (len(LENGTHS), max(LENGTHS)))
    is_token_NT = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return ids_NT * is_token_NT, is_token_NT


def _causal(model):
    ids_NT, is_token_NT = _tokens()

    def losses(model, rows):
        length = max(LENGTHS[row] for row in rows)
        ids, mask = ids_NT[rows, :length], is_token_NT[rows, :length]
        positions = torch.arange(length).expand(len(rows), -1)
        given = {"position_ids": positions} if model.config.model_type not in ("bloom",) else {}
        logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False, **given).logits
        losses_NT = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        return (losses_NT * mask[:, 1:]).sum(1)

    return Case(model, losses)


def _bert():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=28, num_hidden_layers=2, num_attention_heads=2, num_labels=3,
        max_position_embeddings=32,
    )  # fmt: skip
    ids_NT, is_token_NT = _tokens()
    labels_N = torch.tensor([0, 2, 1])

    def losses(model, rows):
        length = max(LENGTHS[row] for row in rows)
        positions = torch.arange(length).expand(len(rows), -1)
        logits = model(
            input_ids=ids_NT[rows, :length],
            attention_mask=is_token_NT[rows, :length].long(),
            token_type_ids=torch.zeros_like(positions),
            position_ids=positions,
        ).logits
        return F.cross_entropy(logits, labels_N[rows], reduction="none")

    return Case(transformers.BertForSequenceClassification(config), losses)


def _t5():
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=28, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    ids_NT, is_token_NT = _tokens()
    targets_NT, _ = _tokens(8)

    def losses(model, rows):
        length = max(LENGTHS[row] for row in rows)
        mask = is_token_NT[rows, :length]
        labels = targets_NT[rows, :length]
        inputs = F.pad(labels, (1, -1))
        logits = model(input_ids=ids_NT[rows, :length], attention_mask=mask.long(), decoder_input_ids=inputs).logits
        return (F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * mask).sum(1)

    return Case(transformers.T5ForConditionalGeneration(config), losses, left_out=("*relative_attention_bias", "shared"))


def _images(model):
    torch.manual_seed(9)
    images, labels_N = torch.randn(3, 3, 16, 16), torch.tensor([1, 0, 2])

    def losses(model, rows):
        pixels = images[rows].to(next(model.parameters()).dtype)
        return F.cross_entropy(model(pixel_values=pixels).logits, labels_N[rows], reduction="none")

    return Case(model, losses)


def _vit():
    config = transformers.ViTConfig(
        hidden_size=16,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config)


def _resnet():
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], layer_type="basic", num_labels=3)
    return transformers.ResNetForImageClassification(config)


FAMILIES = {
    "gpt2": lambda: _causal(_gpt2()),
    "gpt_neox": lambda: _causal(_llama_like("GPTNeoX", num_key_value_heads=None)),
    "llama": lambda: _causal(_llama_like("Llama")),
    "qwen2": lambda: _causal(_llama_like("Qwen2")),
    "qwen3": lambda: _causal(_llama_like("Qwen3", head_dim=6)),
    "qwen2_moe": lambda: _causal(
        _llama_like(
            "Qwen2Moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=10, shared_expert_intermediate_size=14
        )
    ),
    "gemma": lambda: _causal(_llama_like("Gemma", head_dim=6)),
    "phi": lambda: _causal(_llama_like("Phi")),
    "olmo2": lambda: _causal(_llama_like("Olmo2")),
    "mixtral": lambda: _causal(_llama_like("Mixtral", num_local_experts=5, num_experts_per_tok=2)),
    "gpt_oss": lambda: _causal(_llama_like("GptOss", num_local_experts=5, num_experts_per_tok=2, head_dim=6)),
    "opt": lambda: _causal(_opt()),
    "bloom": lambda: _causal(_bloom()),
    "bert": _bert,
    "t5": _t5,
    "vit": lambda: _images(_vit()),
    "resnet": lambda: _images(_resnet()),
}


def family(name: str) -> Case:
    """Build a family's case; its vectors (biases, norms) and statistics (BatchNorm's) are random too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        case = FAMILIES[name]()
        with torch.no_grad():
            for parameter in case.model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            for key, buffer in case.model.named_buffers():
                if "running" in key:
                    buffer.copy_(torch.rand_like(buffer) + 0.5)
    return case

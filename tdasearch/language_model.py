"""A causal language model with its tokenizer: loading, fingerprints, and the loss of a batch of windows.

The loss of an example is the sum over its target tokens of -log p(token | tokens before), so it depends on no neighbour.

Legend: N examples, T positions, K target tokens of a batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from tdasearch.errors import ModelError, UsageError
from tdasearch.head import head_losses, input_of, is_frozen, plain_head
from tdasearch.model_source import must_stay_local
from tdasearch.tokens import tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Ints = Sequence[int] | NDArray[np.int32]
Bools = Sequence[bool] | NDArray[np.bool_]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNKNOWN = nn.Linear(1, 1, device="meta")  # a model's head, before it was looked for


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows side by side, padded on the right, on the model's device.

    Attributes:
        input_ids: [N, T] int64.
        is_token: [N, T] bool, False on padding.
        is_target: [N, T] bool, whether the loss is taken on token t.
        uniforms: [N, T] float64 in [0, 1), one draw a position for sampling targets; None where the data's own are used.
    """

    input_ids: Tensor
    is_token: Tensor
    is_target: Tensor
    uniforms: Tensor | None = None


class LanguageModel:
    """A causal language model and its tokenizer, with what identifies them.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        source: Where it was loaded from, or "" if it was given in memory.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, source: str = "") -> None:
        self.model: nn.Module = getattr(model, "_orig_mod", model)  # under torch.compile hooks never fire: use the original
        self.tokenizer: Any = tokenizer
        self.source = source
        parameter = next(self.model.parameters())
        self.device = parameter.device
        self.dtype = str(parameter.dtype).removeprefix("torch.")
        self.max_tokens = _max_tokens(model)
        self._weights_fingerprint = ""
        self._head: nn.Linear | None = _UNKNOWN

    @property
    def weights_fingerprint(self) -> str:
        """Hash (xxh3-128) of every weight and buffer with its name, type and shape; computed once."""
        if not self._weights_fingerprint:
            digest = xxhash.xxh3_128()
            for name, tensor in sorted(self.model.state_dict().items()):
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
            self._weights_fingerprint = digest.hexdigest()
        return self._weights_fingerprint

    @property
    def tokenizer_fingerprint(self) -> str:
        """Hash of what decides how text becomes tokens."""
        return tokenizer_fingerprint(self.tokenizer)

    def batch(self, token_ids: Sequence[Ints], is_target: Sequence[Bools]) -> Batch:
        """Put windows side by side.

        Args:
            token_ids: Token ids of each window.
            is_target: Which of them the loss is taken on.

        Returns:
            The batch, padded on the right (positions stay those of the text alone) and on the model's device.
        """
        lengths = torch.tensor([len(ids) for ids in token_ids])
        is_token = torch.arange(int(lengths.max())) < lengths[:, None]
        input_ids = torch.zeros(is_token.shape, dtype=torch.int64)
        targets = torch.zeros(is_token.shape, dtype=torch.bool)
        input_ids[is_token] = torch.from_numpy(np.concatenate([np.asarray(ids, dtype=np.int64) for ids in token_ids]))
        targets[is_token] = torch.from_numpy(np.concatenate([np.asarray(flags, dtype=np.bool_) for flags in is_target]))
        return Batch(input_ids.to(self.device), is_token.to(self.device), targets.to(self.device))

    def losses(self, batch: Batch) -> Tensor:
        """Run the model on a batch.

        Args:
            batch: The windows.

        Returns:
            losses_N: -log p summed over each window's target tokens, in nats; with ``batch.uniforms``, over targets drawn from
            the model.
        """
        is_target_NT = batch.is_target[:, 1:]
        examples_K = is_target_NT.nonzero()[:, 0]
        labels_K = batch.input_ids[:, 1:][is_target_NT]
        uniforms_K = None if batch.uniforms is None else batch.uniforms[:, 1:][is_target_NT]

        def labels(logits_kV: Tensor, rows: slice) -> Tensor:
            return labels_K[rows] if uniforms_K is None else sample_labels(logits_kV, uniforms_K[rows])

        head = self._frozen_head(batch)
        if head is not None:
            hidden_NTH = input_of(head, partial(self._logits, batch))
            losses_K = head_losses(head, hidden_NTH[:, :-1][is_target_NT], labels)
        else:
            logits_KV = self._logits(batch)[:, :-1][is_target_NT]
            logits_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32))
            losses_K = nn.functional.cross_entropy(logits_KV, labels(logits_KV, slice(None)), reduction="none")
        return losses_K.new_zeros(batch.input_ids.shape[0]).index_add(0, examples_K, losses_K)

    def _logits(self, batch: Batch) -> Tensor:
        mask = None if batch.is_token.all() else batch.is_token.long()  # without one, attention takes its faster causal path
        logits_NTV: Tensor = self.model(input_ids=batch.input_ids, attention_mask=mask, use_cache=False).logits
        return logits_NTV

    def _frozen_head(self, batch: Batch) -> nn.Linear | None:
        """The head, where its logits are not wanted for themselves; looked for once."""
        if self._head is _UNKNOWN:
            short = Batch(batch.input_ids[:1, :4], batch.is_token[:1, :4], batch.is_target[:1, :4])
            self._head = plain_head(self.model, partial(self._logits, short))
        return self._head if self._head is not None and is_frozen(self._head) else None


def sample_labels(logits_KV: Tensor, uniforms_K: Tensor) -> Tensor:
    """Draw one label a row from the model's own distribution, by inverting its cumulative distribution.

    Args:
        logits_KV: [K, V].
        uniforms_K: [K] in [0, 1): given rather than drawn here, so that a text's labels depend on no neighbour and no device.

    Returns:
        labels_K int64.
    """
    cumulative_KV = torch.softmax(logits_KV.detach(), dim=1).cumsum(1)
    thresholds = uniforms_K[:, None].to(cumulative_KV.dtype) * cumulative_KV[:, -1:]
    return torch.searchsorted(cumulative_KV, thresholds, right=True).squeeze(1).clamp_max(logits_KV.shape[1] - 1)


def uniforms_for(token_ids: Sequence[int], *, seed: int) -> NDArray[np.float64]:
    """Uniform draws of one window, fixed by the seed and the window's own tokens.

    Args:
        token_ids: [T] the window's tokens.
        seed: Of the fit.

    Returns:
        [T] float64 in [0, 1), the same on every machine (Philox's raw bits, whose stream NumPy guarantees).
    """
    key = xxhash.xxh3_64_intdigest(np.asarray(token_ids, dtype="<i4").tobytes())
    bits = np.random.Philox(key=[seed, key]).random_raw(len(token_ids))
    return np.asarray((bits >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def token_batches(num_tokens: Sequence[int], *, batch_tokens: int) -> Iterator[list[int]]:
    """Group windows of similar length: longest first, at most ``batch_tokens`` tokens a batch, padding included.

    Args:
        num_tokens: Tokens of each window.
        batch_tokens: The bound; a single longer window is a batch of its own.

    Yields:
        Positions in ``num_tokens``; each occurs once.
    """
    order = sorted(range(len(num_tokens)), key=lambda row: -num_tokens[row])
    batch: list[int] = []
    for row in order:
        if batch and (len(batch) + 1) * num_tokens[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def halved_if_too_big(rows: list[int], run: Callable[[list[int]], None]) -> None:
    """Run a batch; where the accelerator's memory does not hold it, run its halves.

    Args:
        rows: The batch.
        run: Runs some rows; has no effect if it fails.

    Raises:
        torch.OutOfMemoryError: One window alone does not fit.
    """
    try:
        run(rows)
        return
    except torch.OutOfMemoryError:
        if len(rows) == 1:
            raise
    torch.cuda.empty_cache()  # outside the except block: the error's traceback held the batch
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        halved_if_too_big(half, run)


def load_language_model(
    model: str | Path | PreTrainedModel, *, tokenizer: Any = None, device: str = "auto", dtype: str = "float32"
) -> LanguageModel:
    """Load a causal language model with its tokenizer, or wrap one that is loaded.

    Only safetensors weights are read and no code of the model folder is run.

    Args:
        model: Hub id, local folder, or a loaded model.
        tokenizer: Hub id, local folder, or a loaded tokenizer; by default the model's own.
        device: "auto" (a GPU if there is one), "cpu", "cuda", ...
        dtype: Type of the weights: float32, float64, bfloat16 or float16.

    Returns:
        The model, in evaluation mode if it was loaded here.

    Raises:
        ModelError: It cannot be loaded.
        UsageError: Unknown dtype or device, or a loaded model without its tokenizer.
    """
    if not isinstance(model, str | Path):
        if tokenizer is None:
            raise UsageError("a loaded model needs its tokenizer: pass tokenizer=...")
        return LanguageModel(model, _load_tokenizer(tokenizer))
    if dtype not in DTYPES:
        raise UsageError(f"dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    chosen, source = find_device(device), str(model)
    local = must_stay_local(source)
    from transformers import AutoModelForCausalLM

    loaded_tokenizer = _load_tokenizer(source, local=local) if tokenizer is None else _load_tokenizer(tokenizer)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES[dtype], use_safetensors=True, trust_remote_code=False, local_files_only=local
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(
            f"model {source!r} cannot be loaded as a causal language model with safetensors weights: {_first_line(error)}; "
            "expected a folder written by save_pretrained, or a hub id"
        ) from error
    return LanguageModel(loaded.eval().to(chosen), loaded_tokenizer, source=_absolute(source))


def find_device(device: str) -> torch.device:
    """Return a device by its name.

    Args:
        device: "auto" (a GPU if there is one), "cpu", "cuda", ...

    Returns:
        The device, which was seen to work.

    Raises:
        UsageError: There is no such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        expected = "auto, cpu, or another device of this machine"
        raise UsageError(f"device: expected {expected}, found {device!r}: {_first_line(error)}") from error
    return chosen


def _load_tokenizer(tokenizer: Any, *, local: bool = False) -> Any:
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False, local_files_only=local)
        if len(found) <= len(found.all_special_tokens):  # what transformers makes of a folder without the tokenizer's files
            raise ValueError("its vocabulary is empty")
        return found
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"tokenizer of {str(tokenizer)!r} cannot be loaded: {_first_line(error)}; expected a folder with the tokenizer's "
            "files (tokenizer.json), or a hub id; another one can be given with tokenizer=..."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _absolute(source: str) -> str:
    """A folder is remembered by its absolute path, so that the index can be asked from another folder."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def _max_tokens(model: PreTrainedModel) -> int:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 2:
        raise ModelError(
            "expected the model's configuration to state its context length (max_position_embeddings), "
            f"found {limit!r}; set it on model.config"
        )
    return limit

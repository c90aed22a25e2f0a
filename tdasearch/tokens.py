"""From content to windows of tokens with their targets: one code path for documents and for queries.

Comes in: a ``Content`` and a fast tokenizer (an object; neither torch nor transformers is imported here).
Goes out: ``Tokenised`` (ids, targets and where each token ends in the text), then ``Window`` slices that fit the model.
Does not know: files, models, losses, storage.

Legend: T tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tdasearch.errors import ModelError, TdasearchError, UsageError
from tdasearch.records import Content, Window

_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_Span = tuple[int, int]


class UnusableContent(TdasearchError):
    """A content that no loss can be taken on; the message is the reason, one line for a person."""


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A text as the model sees it. Legend: T tokens.

    Attributes:
        text: Prompt and completion joined, or the rendered conversation.
        token_ids: [T] int32 token ids.
        is_target: [T] bool, whether the loss is taken on token t. Never token 0: nothing is before it.
        char_end: [T] int64, one past the last character of ``text`` that tokens 0 to t hold; never decreases.
        has_bos: Whether token 0 is the tokenizer's beginning-of-sequence token.
    """

    text: str
    token_ids: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]
    char_end: npt.NDArray[np.int64]
    has_bos: bool


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A content as text: the special tokens still to be added, and the spans whose tokens are targets (or their mask)."""

    text: str
    add_special_tokens: bool
    spans: Sequence[_Span] = ()
    mask: Sequence[int] | None = None


def tokenise(tokenizer: Any, content: Content) -> Tokenised:
    """Tokenise a content once and find its target tokens.

    Prompt and completion are joined as they are and tokenised as the tokenizer does by default: its special tokens, nothing
    else. Targets are all tokens from the first that holds a character of the completion. A text that begins with the
    beginning-of-sequence token is already rendered and gets no special tokens.

    A conversation is rendered by the tokenizer's chat template, whose special tokens are part of the text. Targets are the
    tokens of the ``{% generation %}`` blocks where the template has them. Otherwise they are what each assistant message adds
    to the rendering of the messages before it with its generation prompt, so end-of-turn tokens are targets too.

    Args:
        tokenizer: A fast transformers tokenizer.
        content: What the loss is taken on.

    Returns:
        The tokens, with at least one target.

    Raises:
        UnusableContent: If there is no target token, the template fails, or assistant turns cannot be found in its text.
        ModelError: If the tokenizer is not fast (gives no offsets), or has no chat template and the content is a conversation.
    """  # noqa: DOC502 (ModelError is raised by the parts below)
    (result,) = tokenise_many(tokenizer, [content])
    if isinstance(result, UnusableContent):
        raise result
    return result


def tokenise_many(tokenizer: Any, contents: Sequence[Content]) -> list[Tokenised | UnusableContent]:
    """``tokenise`` for many contents with one call of the tokenizer, which spreads them over its threads.

    Args:
        tokenizer: A fast transformers tokenizer.
        contents: What the losses are taken on.

    Returns:
        For each content its tokens, or (not raised) the reason why it cannot be used.

    Raises:
        ModelError: As for ``tokenise``.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"expected a fast tokenizer, which says where each token lies in the text; found {type(tokenizer).__name__}: "
            "load it with use_fast=True or convert it to a tokenizer.json"
        )
    results: list[Tokenised | UnusableContent | None] = [None] * len(contents)
    rendered: dict[int, _Rendered] = {}
    for place, content in enumerate(contents):
        try:
            rendered[place] = _render(tokenizer, content)
        except UnusableContent as reason:
            results[place] = reason
    for add_special_tokens in (False, True):
        places = [place for place, item in rendered.items() if item.add_special_tokens is add_special_tokens]
        for place, (ids, offsets) in zip(
            places, _encode(tokenizer, [rendered[place].text for place in places], add_special_tokens), strict=True
        ):
            try:
                results[place] = _with_targets(tokenizer, contents[place], rendered[place], ids, offsets)
            except UnusableContent as reason:
                results[place] = reason
    return [result for result in results if result is not None]


def windows(tokenised: Tokenised, *, window_tokens: int, stride: int, max_windows: int | None = None) -> list[Window]:
    """Cut a tokenised text into windows that fit the model.

    Windows start every ``min(stride, window_tokens - 1)`` tokens: one token is always there for the first new one to be
    predicted from. That token is the beginning-of-sequence token, repeated at the head of every window and counted in its
    length, or else the last of the window before. Each target is a target in the first window that holds it and context in
    later ones. Windows without a target are left out, as their gradient is exactly zero; numbers stay those of all slices.

    Args:
        tokenised: The tokens.
        window_tokens: Most tokens in a window, at least 2.
        stride: Tokens between two windows' starts, 1 to ``window_tokens``.
        max_windows: Most windows returned: the first that hold targets. A document is cut short if its windows hold fewer
            targets than ``tokenised``.

    Returns:
        The windows. Characters: the first slice starts at 0, the last ends at ``len(text)``, none starts behind the end of the
        one before, and a window that is all new tokens starts exactly there; whitespace goes with the token after it.

    Raises:
        UsageError: If a setting is out of its range.
    """  # noqa: DOC502 (raised by check_windows)
    check_windows(window_tokens=window_tokens, stride=stride, max_windows=max_windows)
    num_tokens, first = len(tokenised.token_ids), int(tokenised.has_bos)
    head = tokenised.token_ids[:first].tolist()
    capacity, step = window_tokens - first, min(stride, window_tokens - 1)
    num_windows = 1 + max(0, -((num_tokens - first - capacity) // -step))
    found: list[Window] = []
    seen = first
    for number in range(num_windows):
        begin = first + number * step
        end = min(begin + capacity, num_tokens)
        is_new = np.arange(begin, end) >= seen
        targets = tokenised.is_target[begin:end] & is_new
        seen = end
        if not targets.any():
            continue
        found.append(
            Window(
                token_ids=head + tokenised.token_ids[begin:end].tolist(),
                is_target=[False] * first + targets.tolist(),
                start=int(tokenised.char_end[begin - 1]) if number else 0,
                end=int(tokenised.char_end[end - 1]) if end < num_tokens else len(tokenised.text),
                number=number,
                num_windows=num_windows,
            )
        )
        if len(found) == max_windows:
            break
    return found


def check_windows(*, window_tokens: int, stride: int, max_windows: int | None) -> None:
    """Refuse settings that ``windows`` cannot follow.

    Args:
        window_tokens: As for ``windows``.
        stride: As for ``windows``.
        max_windows: As for ``windows``.

    Raises:
        UsageError: If a setting is out of its range.
    """
    if window_tokens < 2:
        raise UsageError(f"expected window_tokens of at least 2 (one token predicts the next), found {window_tokens}")
    if not 1 <= stride <= window_tokens:
        raise UsageError(f"expected a stride of 1 to window_tokens = {window_tokens} tokens, found {stride}")
    if max_windows is not None and max_windows < 1:
        raise UsageError(f"expected max_windows of at least 1, or None for no limit, found {max_windows}")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of what decides how text becomes tokens: vocabulary, rules, special tokens and the chat template.

    Padding and truncation are left out: they are state of the last call, and neither is used here.

    Args:
        tokenizer: A fast transformers tokenizer.

    Returns:
        SHA-256 in hexadecimal.

    Raises:
        ModelError: If the tokenizer is not fast.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"expected a fast tokenizer, found {type(tokenizer).__name__}: load it with use_fast=True")
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    parts["truncation"] = parts["padding"] = None
    parts["bos"] = tokenizer.bos_token_id
    parts["chat_template"] = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8")).hexdigest()


def _render(tokenizer: Any, content: Content) -> _Rendered:
    rendered = _render_conversation(tokenizer, content.messages) if content.messages else _render_text(tokenizer, content)
    try:
        rendered.text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnusableContent(f"half of a surrogate pair at character {error.start} is no text") from None
    return rendered


def _render_text(tokenizer: Any, content: Content) -> _Rendered:
    text = content.prompt + content.completion
    # A text that was rendered by a template begins with this token already; the tokenizer would put a second one before it.
    is_rendered = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return _Rendered(text, not is_rendered, [(len(content.prompt), len(text) + 1)])


def _render_conversation(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> _Rendered:
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        raise ModelError(
            "expected a tokenizer with a chat template, as the content is a conversation; found none: "
            "use the chat model's tokenizer, or give prompt and completion instead of messages"
        ) from None
    text = str(_apply_template(tokenizer, messages, tokenize=False))
    if _GENERATION_BLOCK.search(template):
        encoded = _apply_template(tokenizer, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return _Rendered(text, False, mask=encoded["assistant_masks"])
    return _Rendered(text, False, spans=list(_assistant_spans(tokenizer, messages, text)))


def _assistant_spans(tokenizer: Any, messages: Sequence[Mapping[str, Any]], text: str) -> Iterable[_Span]:
    """What each assistant message adds to the rendering of those before it; sound only if each is the next one's beginning."""
    for number, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        if number == 0:
            raise UnusableContent("the conversation begins with the assistant: no generation prompt can be rendered before it")
        before = str(_apply_template(tokenizer, messages[:number], tokenize=False, add_generation_prompt=True))
        after = str(_apply_template(tokenizer, messages[: number + 1], tokenize=False))
        if not (after.startswith(before) and text.startswith(after)):
            changed = f"up to {number + 1} differently once later ones follow"
            if not after.startswith(before):
                changed = f"before {number + 1} (or the generation prompt after them) differently once that one follows"
            raise UnusableContent(
                f"the chat template renders the messages {changed}, so the assistant's part cannot be told apart: "
                "mark it with {% generation %} in the template, or index one turn each"
            )
        yield len(before), len(after)


def _apply_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: bool) -> Any:
    try:
        return tokenizer.apply_chat_template([dict(message) for message in messages], **options)
    except ImportError as error:
        raise ModelError(f"the chat template cannot be rendered: {error}") from error
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        message = " ".join(str(error).split())
        raise UnusableContent(f"the chat template fails on it: {type(error).__name__}: {message}") from error


def _encode(tokenizer: Any, texts: list[str], add_special_tokens: bool) -> Iterable[tuple[list[int], list[_Span]]]:
    if not texts:
        return ()
    encoded = tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        padding=False,
        truncation=False,
        verbose=False,  # longer than the model's context is no fault: windows come next
    )
    return zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)


def _with_targets(
    tokenizer: Any, content: Content, rendered: _Rendered, ids: Sequence[int], offsets: Sequence[_Span]
) -> Tokenised:
    if not ids:
        raise UnusableContent("it has no tokens")
    starts, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    char_end = np.maximum.accumulate(ends)
    if rendered.mask is not None:
        is_target = np.asarray(rendered.mask, dtype=np.bool_)
        assert len(is_target) == len(ids), "the template's text was tokenised in two ways"
    else:
        # Some tokenizers trim whitespace off offsets: a token reaches back to the end of the one before it.
        reach = np.minimum(starts, np.concatenate([[0], char_end[:-1]]))
        is_target = np.zeros(len(ids), dtype=np.bool_)
        for start, end in rendered.spans:
            is_target |= (char_end > start) & (reach < end)
    if content.messages:
        _refuse_rendered_messages(tokenizer, content.messages, opening=rendered.text[: ends[0]], token_id=ids[0])
    is_target[0] = False
    if not is_target.any():
        raise UnusableContent(_no_target_reason(content, len(ids)))
    has_bos = ids[0] == tokenizer.bos_token_id
    return Tokenised(rendered.text, np.asarray(ids, dtype=np.int32), is_target, char_end, has_bos)


def _refuse_rendered_messages(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, opening: str, token_id: int) -> None:
    """A message that begins with the special token that opens the rendering was rendered before."""
    for number, message in enumerate(messages):
        content = message.get("content")
        if not (opening and isinstance(content, str) and content.lstrip().startswith(opening)):
            continue
        token = tokenizer.added_tokens_decoder.get(token_id)
        if token is not None and token.special:
            raise UnusableContent(
                f"message {number + 1} begins with the special token {opening!r}: it was rendered by a chat template already; "
                "give the plain messages, or the rendered conversation as text"
            )


def _no_target_reason(content: Content, num_tokens: int) -> str:
    if content.messages:
        return "no token of an assistant's turn in the conversation"
    if not content.completion:
        return "the completion is empty" if content.prompt else "the text is empty"
    if num_tokens == 1:
        return "a single token: no token is before it to predict it from"
    return "no token holds a character of the completion"

"""The records that pass between reading, indexing and searching. No torch, no storage, no models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Content:
    """What a loss is taken on: a prompt and a completion, a plain text (a completion without a prompt), or a conversation.

    One rule holds for documents and for queries: prompt and completion are joined and tokenised once, and the loss is
    taken on every token from the first one that holds a character of the completion. In a conversation it is taken on the
    assistant's turns.

    Attributes:
        completion: The text whose tokens the loss is taken on. Empty if ``messages`` is given.
        prompt: The text before it; context only.
        messages: A conversation, ``{"role": ..., "content": ...}`` each, instead of prompt and completion.
    """

    completion: str = ""
    prompt: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a corpus.

    Attributes:
        document_id: Unique in an index; by default a hash of the content.
        content: What the loss is taken on.
        metadata: Every other field of the row, as it was read.
        origin: Where it was read, as ``file:line`` (or ``file:row``), for reports.
    """

    document_id: str
    content: Content
    metadata: Mapping[str, Any]
    origin: str


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that was not indexed, and why.

    Attributes:
        origin: Where it was read, as ``file:line``.
        reason: One line for a person.
    """

    origin: str
    reason: str


@dataclass(frozen=True, slots=True)
class Window:
    """A run of a document's tokens that fits the model: one row of the index. Legend: T tokens.

    Attributes:
        token_ids: [T] token ids, a beginning-of-sequence token included where the tokenizer puts one.
        is_target: [T] whether the loss is taken on token t, predicted from the tokens before it. A token is a target in
            one window at most, so the losses of a document's windows add up.
        start: First character of the window in the document's text.
        end: One past its last character. The windows cover the text without a gap.
        number: 0 for a document's first window.
        num_windows: How many windows the document has (rows without a target token are not kept, so fewer may be stored).
    """

    token_ids: Sequence[int]
    is_target: Sequence[bool]
    start: int
    end: int
    number: int
    num_windows: int


@dataclass(frozen=True, slots=True)
class Hit:
    """A document found for a query.

    Attributes:
        rank: 1 for the first.
        score: Influence (or cosine) of the document on the query. Positive: training on the document lowers the query's loss.
        document_id: The document.
        text: The text of its best window; the whole document where it fits one window.
        metadata: The fields that came with the document.
        rescored: True if the score is exact (fresh gradients, uncompressed), False if it was read off the codes.
        window: Number of the best window, from 0.
        num_windows: How many windows the document has.
        start: First character of the window in the document's text.
        end: One past its last character.
        num_tokens: Tokens in the window.
        loss: The window's loss (sum over its target tokens, nats) when it was indexed.
        self_influence: The window's influence on itself, in the coordinates that the index keeps.
    """

    rank: int
    score: float
    document_id: str
    text: str
    metadata: Mapping[str, Any]
    rescored: bool
    window: int = 0
    num_windows: int = 1
    start: int = 0
    end: int = 0
    num_tokens: int = 0
    loss: float = 0.0
    self_influence: float = 0.0


@dataclass(frozen=True, slots=True)
class Hits:
    """The answer to one query.

    Attributes:
        proponents: Highest score first: training on them lowers the query's loss.
        opponents: Lowest score first: training on them raises it.
        loss: The query's loss (sum over its target tokens, nats).
        num_targets: How many target tokens the query has.
    """

    proponents: list[Hit] = field(default_factory=list)
    opponents: list[Hit] = field(default_factory=list)
    loss: float = 0.0
    num_targets: int = 0

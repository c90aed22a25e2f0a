"""From one row of a corpus, whatever file it came from, to a document or to the reason why it is none.

Comes in: a row (a mapping of fields) and its origin. Goes out: a ``Document`` or a ``SkippedRow``.
Does not know: files, tokens, models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import xxhash

from tdasearch.errors import UsageError
from tdasearch.records import Content, Document, SkippedRow


@dataclass(frozen=True, slots=True)
class Fields:
    """The names of the fields that a row's content is read from; every other field is metadata.

    A row's content is its messages if it has them, else its completion (after its prompt, if any), else its text. A row "has" a
    field whose value is not null. Content fields that a row has and does not use are metadata too.

    Attributes:
        document_id: Unique name of the document: a string, or a number that is read as one (1 and "1" are the same). Without
            it the name is a hash of the content.
        text: A plain text.
        prompt: The text before the completion.
        completion: The text that the loss is taken on.
        messages: A conversation: a list of ``{"role": ..., "content": ...}``.

    Raises:
        UsageError: If a name is empty or given twice.
    """

    document_id: str = "id"
    text: str = "text"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"

    def __post_init__(self) -> None:
        """Check the names."""
        names = astuple(self)
        if not all(names) or len(set(names)) < len(names):
            raise UsageError(f"expected five different field names, none empty; found {self}: rename the one in the way")


class UnusableRow(Exception):
    """A row that is no document; the message is the reason, one line for a person."""


Rows = Iterator[tuple[int, object]]
"""What the readers of each kind of file give: the row's place in it, and the row or (not raised) an ``UnusableRow``."""


def document_from_row(row: object, *, origin: str, fields: Fields) -> Document | SkippedRow:
    """Read one row.

    Args:
        row: A mapping of field names to values: what JSON can hold, dates, decimals, UUIDs, and numpy scalars and arrays.
        origin: Where it was read, such as ``file:line``.
        fields: The names of the content's fields.

    Returns:
        The document, its texts exactly as they were; or the row's origin and the reason why it is none.
    """  # noqa: DOC501 (UnusableRow is caught here)
    try:
        if not isinstance(row, Mapping):
            raise UnusableRow(f"expected an object of fields, found {_kind(row)}")
        content, used = _content(row, fields)
        document_id = _document_id(row.get(fields.document_id))
        used |= {fields.document_id}
        # A content field without a value is the column of other rows, not a fact about this one.
        unused = {name for name in astuple(fields) if row.get(name) is None}
        metadata = {_name(name): plain(value) for name, value in row.items() if name not in used and name not in unused}
        _check_characters(document_id, content, metadata)
    except UnusableRow as reason:
        return SkippedRow(origin, str(reason))
    return Document(document_id if document_id is not None else content_hash(content), content, metadata, origin)


def content_hash(content: Content) -> str:
    """Hash of a content: the name of a document that has none, and how two documents of one name are compared.

    Args:
        content: A content without half surrogate pairs.

    Returns:
        XXH3 of 128 bits, in hexadecimal, of the JSON list of prompt, completion and messages.
    """
    parts = [content.prompt, content.completion, [dict(message) for message in content.messages]]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, ensure_ascii=False, separators=(",", ":")).encode("utf-8"))


def plain(value: object) -> Any:
    """A value in the types of JSON (and NaN and infinities, which Python's JSON has).

    Args:
        value: A value of a row.

    Returns:
        None, bool, int, float, str, list or dict. Dates and times become ISO 8601 text; decimals and UUIDs their text.

    Raises:
        UnusableRow: If JSON has no way to say it.
    """
    if isinstance(value, np.generic | np.ndarray):  # first: numpy's float64 is a float, its str_ a str
        return plain(value.tolist())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {_name(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal | UUID):
        return str(value)
    raise UnusableRow(f"a field holds {_kind(value)}, which JSON cannot say: convert the field or leave it out")


def json_text(value: object) -> str:
    """Strict JSON of a plain value: NaN and infinities, which JSON cannot say, become null.

    Args:
        value: What ``plain`` returns.

    Returns:
        The JSON, with characters beyond ASCII as they are.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def _content(row: Mapping[Any, Any], fields: Fields) -> tuple[Content, set[str]]:
    """The content, and the names of the fields that it was read from."""
    if row.get(fields.messages) is not None:
        return Content(messages=_messages(row[fields.messages], fields.messages)), {fields.messages}
    if row.get(fields.completion) is not None:
        completion = _text(row, fields.completion)
        prompt = row.get(fields.prompt)
        has_prompt = prompt is not None and not (isinstance(prompt, str) and not prompt)
        return Content(completion, _text(row, fields.prompt) if has_prompt else ""), {fields.completion, fields.prompt}
    if fields.text in row:
        return Content(_text(row, fields.text)), {fields.text}
    if fields.completion in row:
        raise UnusableRow(f"the field {fields.completion!r} is null")
    found = ", ".join(repr(name) for name in list(row)[:8]) or "none"
    raise UnusableRow(f"expected a field {fields.text!r}, {fields.completion!r} or {fields.messages!r}, found {found}")


def _text(row: Mapping[Any, Any], name: str) -> str:
    value = row[name]
    if value is None:
        raise UnusableRow(f"the field {name!r} is null")
    if not isinstance(value, str):
        raise UnusableRow(f"the field {name!r} is {_kind(value)}, expected a text")
    if not value:
        raise UnusableRow(f"the field {name!r} is empty")
    return str(value)


def _messages(value: object, name: str) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UnusableRow(f"the field {name!r} is {_kind(value)}, expected a list of messages")
    if not value:
        raise UnusableRow(f"the field {name!r} is empty")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UnusableRow(f"message {number + 1} of {name!r} is {_kind(message)} without a role, expected role and content")
        # Tables give every message every key; a template asks whether a key is there.
        message = {key: item for key, item in plain(message).items() if item is not None}
        if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
            raise UnusableRow(f"message {number + 1} of {name!r} has no content: it is {_kind(message.get('content'))}")
        messages.append(message)
    return tuple(messages)


def _document_id(value: object) -> str | None:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float | UUID):
        raise UnusableRow(f"the document's id is {_kind(value)}, expected a text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise UnusableRow(f"the document's id is {value}, expected a text or a number")
    if value == "":
        raise UnusableRow("the document's id is empty")
    return str(value)


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise UnusableRow(f"a field's name is {_kind(name)}, expected a text")
    return name


def _check_characters(document_id: str | None, content: Content, metadata: Mapping[str, Any]) -> None:
    """No UTF-8 exists for half a surrogate pair, so neither a tokenizer nor a table can hold it."""
    parts = [document_id, content.prompt, content.completion, content.messages, metadata]
    written = "".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts)
    try:
        written.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(written[error.start])
        if 0xDC80 <= code <= 0xDCFF:  # what the readers' surrogateescape makes of a byte; a lone escape reads the same
            raise UnusableRow(f"the byte 0x{code - 0xDC00:02x} (or half of a surrogate pair) is no UTF-8") from None
        raise UnusableRow(f"half of a surrogate pair (\\u{code:04x}) is no text") from None


def _kind(value: object) -> str:
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (type(None), "null"),
        (bool, "true or false"),
        ((int, float), "a number"),
        (str, "a text"),
        ((list, tuple), "a list"),
        (Mapping, "an object"),
    )
    return next((words for kind, words in kinds if isinstance(value, kind)), f"a {type(value).__name__}")

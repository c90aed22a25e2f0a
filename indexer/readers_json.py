"""Rows of JSON files, one at a time: lines are recovered one by one, which no library does.

Comes in: a binary stream. Goes out: ``(place, row)``, where a row that cannot be read is an ``UnusableRow`` with the reason.
Does not know: which fields a row should have.
"""

from __future__ import annotations

import codecs
import json
from typing import Any, BinaryIO

from tdasearch.errors import CorpusError
from tdasearch.indexer.readers_rows import Rows, UnusableRow


class _RepeatedKeyError(ValueError):
    """An object names a field twice: which value is meant cannot be known."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise _RepeatedKeyError(f"the field {repeated!r} is there twice in one object")
    return found


_STRICT = json.JSONDecoder(object_pairs_hook=_object)
_LENIENT = json.JSONDecoder()
_WHITESPACE = " \t\n\r"


def json_lines(stream: BinaryIO) -> Rows:
    r"""Rows of a file with one JSON value a line.

    Lines end with ``\n`` or ``\r\n`` and with nothing else (JSON texts may hold U+2028 and its like); blank ones are passed
    over, a byte order mark is stripped.

    Args:
        stream: The file.

    Yields:
        The line's number from 1 and its value, or the reason why it has none.
    """
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip(_WHITESPACE.encode()):
            yield number, _line(line)


def json_list(stream: BinaryIO) -> Rows:
    """Rows of a file that is one JSON list; it is read whole, so large corpora are better off as JSON lines.

    Args:
        stream: The file.

    Yields:
        The item's number from 1 and its value, or the reason why it has none.

    Raises:
        CorpusError: If the list breaks off or is no JSON: where its next item begins cannot be known.
    """  # noqa: DOC501, DOC502 (_broken makes a CorpusError)
    # Bytes that are no UTF-8 become half surrogates, which are found in the item that holds them: the others are kept.
    text = stream.read().removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="surrogateescape")
    position, number = _skip_whitespace(text, 0) + 1, 0
    position = _skip_whitespace(text, position)
    while text[position : position + 1] != "]":
        number += 1
        try:
            value, position = _item(text, position)
        except (ValueError, RecursionError) as error:
            raise _broken(f"its item {number} is no JSON ({_first_line(error)})") from None
        yield number, value
        position = _skip_whitespace(text, position)
        separator = text[position : position + 1]
        if separator == ",":
            position = _skip_whitespace(text, position + 1)
        elif separator != "]":
            raise _broken(f"found {separator or 'the end of the file'!r} after its item {number}, expected ',' or ']'")
    rest = _skip_whitespace(text, position + 1)
    if rest < len(text):
        raise _broken(f"found {text[rest]!r} after its end")


def is_json_list(stream: BinaryIO) -> bool:
    """Whether a file holds one JSON list rather than a value a line: it opens with a bracket.

    Args:
        stream: The file; it is left at its beginning.

    Returns:
        True for a list.
    """
    head = stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    stream.seek(0)
    return head.startswith(b"[")


def _line(line: bytes) -> object:
    try:
        return _STRICT.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return UnusableRow(f"byte 0x{line[error.start]:02x} at column {error.start + 1} is no UTF-8")
    except RecursionError:
        return UnusableRow("no JSON: nested too deeply")
    except _RepeatedKeyError as error:
        return UnusableRow(str(error))
    except ValueError as error:
        is_cut = not line.endswith(b"\n")
        return UnusableRow(f"no JSON: {_first_line(error)}" + (" (the file may have been cut off here)" if is_cut else ""))


def _item(text: str, position: int) -> tuple[object, int]:
    try:
        return _STRICT.raw_decode(text, position)
    except _RepeatedKeyError as error:
        return UnusableRow(str(error)), _LENIENT.raw_decode(text, position)[1]


def _skip_whitespace(text: str, position: int) -> int:
    while position < len(text) and text[position] in _WHITESPACE:
        position += 1
    return position


def _broken(found: str) -> CorpusError:
    return CorpusError(f"expected a JSON list, {found}: mend the file, or write JSON lines, of which single bad ones are skipped")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__

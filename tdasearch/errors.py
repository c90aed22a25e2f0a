"""One error class for everything a user can mend: what was expected, what was found, what to do."""

from __future__ import annotations


class TdasearchError(Exception):
    """An error whose message is meant for the user: one line, and exit status 1 on the command line."""


class UsageError(TdasearchError, ValueError):
    """The request itself is wrong (k below 1, an unknown option value): exit status 2 on the command line."""


class CorpusError(TdasearchError):
    """The corpus cannot be read, is empty, or holds a bad row while ``strict`` is on."""


class ModelError(TdasearchError):
    """The model or its tokenizer cannot be loaded, or is not the one that the index was built with."""


class CaptureError(TdasearchError):
    """A module's gradient could not be captured, so a vector would have been wrong or missing."""


class StoreError(TdasearchError):
    """An index is missing, exists already, is damaged, or is being written by another process."""

"""tdasearch: which training documents made the model say that?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tdasearch.api import build_index, open_index
    from tdasearch.errors import CaptureError, CorpusError, ModelError, StoreError, TdasearchError, UsageError
    from tdasearch.exact import influence
    from tdasearch.index import Index
    from tdasearch.indexer.readers import Fields
    from tdasearch.records import Content, Hit, Hits
    from tdasearch.task import Task
    from tdasearch.trainer import CaptureCallback
    from tdasearch.training import TrainingBatch, TrainingCapture, capture_training

_HOMES = {
    "build_index": "tdasearch.api",
    "open_index": "tdasearch.api",
    "Index": "tdasearch.index",
    "Fields": "tdasearch.indexer.readers",
    "Content": "tdasearch.records",
    "Hit": "tdasearch.records",
    "Hits": "tdasearch.records",
    "influence": "tdasearch.exact",
    "Task": "tdasearch.task",
    "CaptureCallback": "tdasearch.trainer",
    "TrainingBatch": "tdasearch.training",
    "TrainingCapture": "tdasearch.training",
    "capture_training": "tdasearch.training",
    "TdasearchError": "tdasearch.errors",
    "UsageError": "tdasearch.errors",
    "CorpusError": "tdasearch.errors",
    "ModelError": "tdasearch.errors",
    "CaptureError": "tdasearch.errors",
    "StoreError": "tdasearch.errors",
}
__version__ = "0.1.0"
__all__ = [
    "CaptureCallback",
    "CaptureError",
    "Content",
    "CorpusError",
    "Fields",
    "Hit",
    "Hits",
    "Index",
    "ModelError",
    "StoreError",
    "Task",
    "TdasearchError",
    "TrainingBatch",
    "TrainingCapture",
    "UsageError",
    "build_index",
    "capture_training",
    "influence",
    "open_index",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that ``import tdasearch`` loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tdasearch' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)

"""FAISS, imported when it is first needed, from exactly one of its two wheels, on the threads that the process may use."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from typing import Any

from tdasearch.errors import TdasearchError

_WHEELS = {"faiss-cpu": "tdasearch[cpu]", "faiss-gpu": "tdasearch[gpu]"}


@functools.cache
def faiss_module() -> Any:
    """Import FAISS.

    Returns:
        The module.

    Raises:
        TdasearchError: It is missing, cannot be loaded, or both wheels are installed over each other.
    """
    installed = [wheel for wheel in _WHEELS if _is_installed(wheel)]
    if len(installed) > 1:
        raise TdasearchError(
            f"expected one of {' and '.join(installed)}, found both: they own the same module; uninstall both, "
            f"then install {' or '.join(_WHEELS.values())}"
        )
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        wheels = " or ".join(_WHEELS.values())
        raise TdasearchError(f"searching needs FAISS, which cannot be imported ({error}); install {wheels}") from error


def allow_threads() -> Any:
    """Let FAISS use the threads that this process may use: its CPU affinity, and OMP_NUM_THREADS where that is less.

    OpenMP keeps the setting by thread, so whoever calls FAISS calls this first.

    Returns:
        The module.
    """
    faiss = faiss_module()
    faiss.omp_set_num_threads(_num_threads())
    return faiss


@functools.cache
def _num_threads() -> int:
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(num_cpus, int(faiss_module().omp_get_max_threads())))


def _is_installed(wheel: str) -> bool:
    try:
        importlib.metadata.distribution(wheel)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True

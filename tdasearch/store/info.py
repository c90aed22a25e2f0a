"""What an index says of itself."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from tdasearch.codes import code_bytes
from tdasearch.store.documents import Snapshot
from tdasearch.store.manifest import Manifest


def describe(path: Path, manifest: Manifest, snapshot: Snapshot | None) -> dict[str, Any]:
    """Describe an index in plain values.

    Args:
        path: Its folder.
        manifest: Its manifest.
        snapshot: A version of its table; None if a build was stopped before it made one.

    Returns:
        ``documents``, ``windows``, ``bytes_per_document`` (of the code; budgets are bytes a row), ``method``, ``plan``,
        ``covered_parameters`` with the share of all, ``model``, ``skipped`` rows, ``truncated`` documents and more.
    """
    plan = manifest.plan
    totals = {
        name: sum(getattr(part, f"num_{name}") for part in manifest.corpus)
        for name in ("skipped", "duplicates", "truncated", "tokens")
    }
    return {
        "path": str(path),
        "state": manifest.state,
        "documents": snapshot.num_documents if snapshot else 0,
        "windows": snapshot.num_rows if snapshot else 0,
        "bytes_per_document": code_bytes(plan.code, plan.sketch_dim),
        "method": manifest.method,
        "plan": asdict(plan),
        "covered_parameters": plan.num_covered_parameters,
        "covered_share": plan.num_covered_parameters / manifest.model.num_parameters,
        "model": asdict(manifest.model),
        "expected_fidelity": None,
        **totals,
        "skipped_path": str(path / "skipped") if totals["skipped"] or totals["duplicates"] else None,
        "columns": manifest.fields,
        "corpus": [asdict(part) for part in manifest.corpus],
        "encoder_fingerprint": manifest.encoder_fingerprint,
        "format_version": manifest.format_version,
        "created_by": manifest.created_by,
        "table_version": snapshot.version if snapshot else None,
    }

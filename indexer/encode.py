"""Encoding: a shard of windows to rows with codes, ready for one commit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa

from tdasearch import codes
from tdasearch.capture import Capture
from tdasearch.encoder import Encoder
from tdasearch.indexer.job import Job
from tdasearch.language_model import halved_if_too_big, token_batches
from tdasearch.progress import Step
from tdasearch.records import SkippedRow


def encode_shard(
    windows: pa.Table, job: Job, capture: Capture, encoder: Encoder, *, code: str, step: Step
) -> tuple[pa.Table, list[SkippedRow]]:
    """Encode the windows of one shard.

    Args:
        windows: Rows without ``loss``, ``self_influence`` and ``code``.
        job: The run, for the model and its batches.
        capture: Its entered capture.
        encoder: The fitted encoder.
        code: Kind of code.
        step: Progress, called with the number of tokens done.

    Returns:
        The rows with their codes, in the same order, and the windows left out because their gradient is not finite or exactly
        zero (no such vector is ever stored; its neighbours' do not depend on it).
    """
    token_ids, is_target = windows["token_ids"].to_pylist(), windows["is_target"].to_pylist()
    language_model = job.language_model
    vectors_ND = np.zeros((len(token_ids), encoder.sketch_dim), dtype=np.float32)
    losses_N = np.zeros(len(token_ids))
    self_influence_N = np.zeros(len(token_ids))

    def run(rows: list[int]) -> None:
        batch = language_model.batch([token_ids[row] for row in rows], [is_target[row] for row in rows])
        encoded = encoder.encode(capture, partial(language_model.losses, batch))
        vectors_ND[rows] = encoded.vectors_ND.cpu().numpy()
        losses_N[rows] = encoded.losses_N.cpu().numpy()
        self_influence_N[rows] = encoded.self_influence_N.cpu().numpy()
        step(sum(len(token_ids[row]) for row in rows))

    for rows in token_batches([len(ids) for ids in token_ids], batch_tokens=job.batch_tokens):
        halved_if_too_big(rows, run)

    finite_N = np.isfinite(vectors_ND).all(axis=1) & np.isfinite(losses_N) & np.isfinite(self_influence_N)
    usable_N = finite_N & vectors_ND.any(axis=1)
    skipped = [
        SkippedRow(
            origin=f"{windows['document_id'][int(row)].as_py()} (window {windows['window'][int(row)].as_py()})",
            reason="its gradient is exactly zero"
            if finite_N[row]
            else f"its gradient or loss is not finite (loss {losses_N[row]})",
        )
        for row in np.flatnonzero(~usable_N)
    ]
    kept = np.flatnonzero(usable_N)
    coded = (
        codes.encode(vectors_ND[kept], code) if kept.size else np.zeros((0, codes.code_bytes(code, encoder.sketch_dim)), np.uint8)
    )
    rows_kept = windows.take(pa.array(kept))
    for name, column in (
        ("loss", pa.array(losses_N[kept])),
        ("self_influence", pa.array(self_influence_N[kept])),
        (
            "code",
            pa.FixedSizeBinaryArray.from_buffers(pa.binary(coded.shape[1]), len(kept), [None, pa.py_buffer(coded.tobytes())]),
        ),
    ):
        rows_kept = rows_kept.append_column(name, column)
    return rows_kept, skipped

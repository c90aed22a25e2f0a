"""dattri-llm 0.1.0, weights frozen: projected gradients to disk (LoGra, 16 x 16 a layer), and exact EK-FAC scores.

`pip install torch transformers datasets accelerate torchopt jaxtyping pyyaml`, then `pip install --no-deps dattri==0.3.0
dattri-llm==0.1.0`. EK-FAC is fitted on all documents, and scores the queries too; both are in its time.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import workload


def main() -> None:
    """Measure both configurations."""
    arguments, corpus = workload.peer_arguments(__doc__), workload.Corpus()
    with tempfile.TemporaryDirectory() as folder:
        for configuration, make in (("disk-logra, 16 x 16", _logra), ("exact EK-FAC", _ekfac)):
            workload.report_peer(
                "dattri-llm 0.1.0", configuration, lambda make=make: make(arguments, corpus, Path(folder)), arguments, corpus
            )


def _frozen(name: str) -> Any:
    model = workload.make_model(name)
    model.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)  # gradients begin somewhere
    return model


def _logra(arguments: Any, corpus: workload.Corpus, folder: Path) -> Callable[[], None]:
    from dattri_llm import GradientStorageManager, HookManager, HookManagerConfig, OffloadCallback

    model, ids_NT = _frozen(arguments.model), corpus.ids_NT[: arguments.documents]
    projection = {"style": "logra", "proj_dim": 16, "proj_max_batch_size": 8, "proj_type": "rademacher"}
    config = HookManagerConfig(
        linear_io=[workload.LAYERS[arguments.model]],
        include_frozen=True,
        projection_kwargs={"__default__": projection},
        capture_style="materialized",
    )

    def run() -> None:
        path = folder / "gradients"
        store = GradientStorageManager(str(path))
        hooks = HookManager(model, config=config, callbacks=[OffloadCallback(1, store, recording_type="per_sample")])
        try:
            with hooks.collect():
                for batch_NT in ids_NT.split(workload.BATCH_DOCUMENTS):
                    model(input_ids=batch_NT, labels=batch_NT).loss.backward()
                    model.zero_grad()
        finally:
            hooks.remove()
        shutil.rmtree(path)

    return run


def _ekfac(arguments: Any, corpus: workload.Corpus, folder: Path) -> Callable[[], None]:
    from dattri_llm import AttributionArguments, AttributionTask, EKFACAttributor, HookManagerConfig

    model, ids_NT = _frozen(arguments.model), corpus.ids_NT[: arguments.documents]
    queries_QT = corpus.ids_NT[-workload.NUM_QUERIES :, : workload.QUERY_TOKENS]
    config = HookManagerConfig(linear_io=[workload.LAYERS[arguments.model]], include_frozen=True)
    passes = iter(range(1_000_000))

    def run() -> None:
        settings = AttributionArguments(
            output_dir=str(folder / f"scores{next(passes)}"),
            per_device_train_batch_size=workload.BATCH_DOCUMENTS,
            per_device_eval_batch_size=workload.BATCH_DOCUMENTS,
        )
        attributor = EKFACAttributor(settings, task=AttributionTask(lambda model, batch: model(**batch).loss, model))
        attributor.attribute(workload.Documents(ids_NT), workload.Documents(queries_QT), hook_config=config).agnostic_matrix()

    return run


if __name__ == "__main__":
    main()

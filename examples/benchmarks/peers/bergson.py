"""bergson 2.5.1: `build` (projected gradients to disk, 16 x 16 a layer) and `trackstar` (the same, preconditioned, with scores).

`pip install torch transformers datasets accelerate peft scipy jaxtyping ml_dtypes natsort petname pyyaml simple-parsing`, then
`pip install --no-deps bergson==2.5.1`.
Its time holds what a user pays on each run: it loads model, tokenizer and documents from disk.
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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for configuration, make in (("build, 16 x 16", _build), ("trackstar, 16 x 16", _trackstar)):
            workload.report_peer(
                "bergson 2.5.1", configuration, lambda make=make: make(arguments, corpus, folder), arguments, corpus
            )


def _stage(arguments: Any, corpus: workload.Corpus, folder: Path) -> None:
    from datasets import Dataset

    if (folder / "model").exists():
        return
    workload.make_model(arguments.model).save_pretrained(folder / "model")
    corpus.tokenizer().save_pretrained(folder / "tokenizer")
    queries = [" ".join(text.split(" ")[: workload.QUERY_TOKENS]) for text in corpus.texts[-workload.NUM_QUERIES :]]
    for name, texts in (("documents", corpus.texts[: arguments.documents]), ("queries", queries)):
        Dataset.from_dict({"text": texts}).save_to_disk(str(folder / name))


def _config(folder: Path, name: str) -> Any:
    from bergson.config.config import DataConfig, IndexConfig

    return IndexConfig(
        run_path=str(folder / name),
        model=str(folder / "model"),
        tokenizer=str(folder / "tokenizer"),
        data=DataConfig(dataset=str(folder / "documents")),
        projection_dim=16,
        projection_target="per_module",
        precision="fp32",
        token_batch_size=workload.BATCH_DOCUMENTS * workload.TOKENS,
    )


def _fresh(folder: Path, name: str) -> None:
    for path in folder.glob(name + "*"):
        shutil.rmtree(path)


def _build(arguments: Any, corpus: workload.Corpus, folder: Path) -> Callable[[], None]:
    from bergson.build import build
    from bergson.cli.commands import Build
    from bergson.config.config import PreprocessConfig
    from bergson.config.config_io import save_run_config

    _stage(arguments, corpus, folder)

    def run() -> None:
        _fresh(folder, "built")
        config = _config(folder, "built")
        config.partial_run_path.mkdir(parents=True, exist_ok=True)
        save_run_config(Build(config, PreprocessConfig()), config.partial_run_path)
        build(config, PreprocessConfig())

    return run


def _trackstar(arguments: Any, corpus: workload.Corpus, folder: Path) -> Callable[[], None]:
    from bergson.cli.trackstar import trackstar
    from bergson.config.config import QuerySetConfig, TrackstarConfig

    _stage(arguments, corpus, folder)
    queries = QuerySetConfig(dataset=str(folder / "queries"), aggregation="none")

    def run() -> None:
        _fresh(folder, "tracked")
        trackstar(_config(folder, "tracked"), TrackstarConfig(query=queries))

    return run


if __name__ == "__main__":
    main()

"""kronfluence 1.0.1: EK-FAC factors fitted on all documents, then scores of the queries, exact.

`pip install torch transformers datasets accelerate einconv einops opt_einsum`, then `pip install --no-deps kronfluence==1.0.1`.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import workload


def main() -> None:
    """Measure it."""
    arguments, corpus = workload.peer_arguments(__doc__), workload.Corpus()
    with tempfile.TemporaryDirectory() as folder:
        workload.report_peer("kronfluence 1.0.1", "exact EK-FAC", lambda: _ekfac(arguments, corpus, folder), arguments, corpus)


def _ekfac(arguments: Any, corpus: workload.Corpus, folder: str) -> Callable[[], None]:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    model = workload.make_model(arguments.model)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and re.search(workload.LAYERS[arguments.model], name)
    ]

    class LanguageModelling(Task):  # type: ignore[misc]
        def compute_train_loss(self, batch: Any, model: Any, sample: bool = False) -> Any:
            logits_KV = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
            labels_K = batch["labels"][:, 1:].flatten()
            if sample:
                with torch.no_grad():
                    labels_K = torch.multinomial(logits_KV.softmax(-1), 1).flatten()
            return F.cross_entropy(logits_KV, labels_K, reduction="sum")

        def compute_measurement(self, batch: Any, model: Any) -> Any:
            return self.compute_train_loss(batch, model)

        def get_influence_tracked_modules(self) -> list[str]:
            return names

        def get_attention_mask(self, batch: Any) -> Any:
            return batch["attention_mask"]

    task = LanguageModelling()
    analyzer = Analyzer("speed", model=prepare_model(model, task), task=task, cpu=True, output_dir=folder, disable_tqdm=True)
    documents = workload.Documents(corpus.ids_NT[: arguments.documents])
    queries = workload.Documents(corpus.ids_NT[-workload.NUM_QUERIES :, : workload.QUERY_TOKENS])

    def run() -> None:
        analyzer.fit_all_factors(
            "factors",
            documents,
            per_device_batch_size=workload.BATCH_DOCUMENTS,
            factor_args=FactorArguments(strategy="ekfac"),
            overwrite_output_dir=True,
        )
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            queries,
            documents,
            per_device_query_batch_size=workload.NUM_QUERIES,
            per_device_train_batch_size=workload.BATCH_DOCUMENTS,
            score_args=ScoreArguments(),
            overwrite_output_dir=True,
        )
        analyzer.load_pairwise_scores("scores")

    return run


if __name__ == "__main__":
    main()

"""An opened index: what users hold. Everything heavy (model, factors, codes) is loaded when it is first needed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tdasearch.errors import ModelError, StoreError
from tdasearch.records import Content, Hit, Hits
from tdasearch.store.manifest import Manifest, read_manifest

if TYPE_CHECKING:
    from tdasearch.encoder import Encoder
    from tdasearch.indexer.readers import Corpus, Fields
    from tdasearch.language_model import LanguageModel
    from tdasearch.store.ann import Ann
    from tdasearch.store.documents import DocumentTable, Snapshot


class Index:
    """A tdasearch index, as ``build_index`` and ``open_index`` return it.

    Args:
        path: The index's folder.
        language_model: The model it was built with, if it is loaded already.
        device: Where to load the model otherwise.
    """

    def __init__(self, path: Path, *, language_model: LanguageModel | None = None, device: str = "auto") -> None:
        self.path = path
        self._given = language_model
        self._device = device
        self._ann: dict[tuple[int, str], Ann] = {}
        self.manifest: Manifest = read_manifest(path)

    @cached_property
    def language_model(self) -> LanguageModel:
        """The model, checked to be the one that the index was built with.

        Raises:
            ModelError: Other weights, another tokenizer, or no way to load the model.
        """
        from tdasearch.language_model import load_language_model

        record = self.manifest.model
        if self._given is None and not record.source:
            raise ModelError(
                "this index was built with a model given in memory: pass it, open_index(path, model=..., tokenizer=...)"
            )
        try:
            found = self._given or load_language_model(record.source, device=self._device, dtype=record.dtype)
        except ModelError as error:
            raise ModelError(f"{error}; if it moved, say where it is now: --model, or open_index(path, model=...)") from error
        for what, built_with, is_now in (
            ("weights", record.weights_fingerprint, found.weights_fingerprint),
            ("tokenizer", record.tokenizer_fingerprint, found.tokenizer_fingerprint),
        ):
            if built_with != is_now:
                raise ModelError(
                    f"{self.path}: this index was built with other {what} (fingerprint {built_with[:12]}, found {is_now[:12]} in "
                    f"{found.source or 'the model given'}); its vectors mean nothing here: open the original, or build again"
                )
        return found

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder that made the index's codes."""
        from tdasearch.encoder import Encoder
        from tdasearch.store.factors import load_factors

        if not self.manifest.encoder_fingerprint:
            raise StoreError(
                f"{self.path}: the build was stopped before its factors were fitted; run the same build again to go on"
            )
        plan = self.manifest.plan
        factors = load_factors(self.path, fingerprint=self.manifest.encoder_fingerprint, device=self.language_model.device)
        return Encoder(factors, eigenbasis_share=plan.eigenbasis_share, sketch_dim=plan.sketch_dim, seed=plan.seed)

    @cached_property
    def table(self) -> DocumentTable:
        """The documents and their codes: the source of truth."""
        from tdasearch.store.documents import DocumentTable, documents_path

        return DocumentTable.open(documents_path(self.path))

    def ann(self, snapshot: Snapshot, *, score: str) -> Ann:
        """Open the search cache of one version of the table, and forget those of older versions.

        Args:
            snapshot: The version.
            score: "influence" or "cosine".

        Returns:
            The cache, built if it is missing or not trustworthy.
        """
        from tdasearch.store.ann import open_ann

        key = (snapshot.version, score)
        if key not in self._ann:
            self._ann = {held: ann for held, ann in self._ann.items() if held[0] == snapshot.version}
            plan = self.manifest.plan
            self._ann[key] = open_ann(
                self.path,
                snapshot,
                code=plan.code,
                sketch_dim=plan.sketch_dim,
                encoder_fingerprint=self.manifest.encoder_fingerprint,
                score=score,
            )
        return self._ann[key]

    def search(
        self,
        prompt: str = "",
        completion: str = "",
        *,
        k: int = 10,
        where: str | None = None,
        rescore: int | str = 200,
        score: str = "influence",
        opponents: bool = True,
        quiet: bool = True,
    ) -> Hits:
        """Find the documents that made the model say ``completion`` after ``prompt``.

        Args:
            prompt: The text before; context only. Empty: the loss is taken on the whole completion.
            completion: The output to explain. Joined to the prompt as it is, so it usually begins with a space.
            k: Documents wanted at each end.
            where: SQL filter on the metadata columns, such as ``"source = 'wiki' AND year > 2000"``.
            rescore: How many windows of the shortlist are rescored exactly; "all" scores every document exactly; 0 none.
            score: "influence", or "cosine" (influence divided by the root of both self-influences).
            opponents: Whether the other end of the ranking is wanted too.
            quiet: Show no progress.

        Returns:
            Proponents and opponents.

        Raises:
            UsageError: k below 1, an unknown column or bad SQL, an empty completion, a prompt longer than the context.
        """
        query = Content(prompt=prompt, completion=completion)
        return self.search_many([query], k=k, where=where, rescore=rescore, score=score, opponents=opponents, quiet=quiet)[0]

    def search_many(
        self,
        queries: Sequence[Content],
        *,
        k: int = 10,
        where: str | None = None,
        rescore: int | str = 200,
        score: str = "influence",
        opponents: bool = True,
        quiet: bool = True,
    ) -> list[Hits]:
        """Search for several outputs at once; they share the passes over the candidates.

        Args:
            queries: The outputs.
            k: As in ``search``.
            where: As in ``search``.
            rescore: As in ``search``; a number is counted for each query.
            score: As in ``search``.
            opponents: As in ``search``.
            quiet: As in ``search``.

        Returns:
            One answer a query, in order.
        """
        from tdasearch.query.engine import search
        from tdasearch.query.queries import SearchOptions

        options = SearchOptions(k=k, where=where, rescore=rescore, score=score, opponents=opponents, quiet=quiet)
        if self.manifest.state == "building" and len(self.manifest.corpus) == 1:
            warnings.warn(f"{self.path}: its build is not finished; only what is in it so far is searched", stacklevel=2)
        return search(self, queries, options)

    def search_text(self, text: str, *, k: int = 10, where: str | None = None) -> list[Hit]:
        """Find documents by words (BM25): the baseline that influence has to be compared with.

        Args:
            text: The words.
            k: Documents wanted.
            where: SQL filter, as in ``search``.

        Returns:
            Hits whose score is BM25's; only documents that share a word with ``text`` are found.
        """
        from tdasearch.query.lexical import search_text

        return search_text(self, text, k=k, where=where)

    def add(
        self, corpus: Corpus, *, fields: Fields | None = None, batch_tokens: int = 2048, strict: bool = False, quiet: bool = False
    ) -> None:
        """Add documents, encoded with the factors that the index has. Documents that it holds already are not added twice.

        Args:
            corpus: As in ``build_index``.
            fields: Names of the corpus's fields.
            batch_tokens: Tokens run at once.
            strict: Stop at the first bad row instead of reporting it.
            quiet: Show no progress.
        """
        from tdasearch.indexer.build import add
        from tdasearch.indexer.job import Job
        from tdasearch.indexer.readers import Fields, read_corpus

        fields = fields or Fields()
        read_corpus(corpus, fields=fields)  # reads nothing yet, but says at once if there is nothing to read
        language_model = self.language_model
        add(Job(corpus, language_model, self.path, fields, batch_tokens=batch_tokens, strict=strict, quiet=quiet))
        self.manifest = read_manifest(self.path)

    def info(self) -> dict[str, Any]:
        """Describe the index: what it holds, how it was made, what it covers.

        Returns:
            Plain values, ready for JSON.
        """
        from tdasearch.store.documents import documents_path
        from tdasearch.store.info import describe

        unwritten = self.manifest.state == "building" and not documents_path(self.path).exists()
        return describe(self.path, self.manifest, None if unwritten else self.table.latest())

    def explain_costs(self, *, batch_tokens: int = 2048) -> list[dict[str, Any]]:
        """Say what the cost model chooses on this machine, for each module, and what it predicts of each route.

        Args:
            batch_tokens: Tokens run at once, in whole windows.

        Returns:
            A row for each module and step ("fit", "encode", "rescore"), as ``tdasearch explain --costs`` prints them; the model
            is not loaded.
        """
        from tdasearch.language_model import find_device
        from tdasearch.store.costs import explain_costs

        device = self._given.device if self._given else find_device(self._device)
        return explain_costs(self.path, self.manifest, device=device, batch_tokens=batch_tokens)

    def __repr__(self) -> str:
        return f"Index({str(self.path)!r})"

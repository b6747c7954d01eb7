"""The tool `search`: BM25 over a JSONL file."""

from __future__ import annotations

import functools
import heapq
import json
import math
import re
from array import array
from collections import Counter, defaultdict
from pathlib import Path

from spmdrl.environments.protocol import check_at_least
from spmdrl.errors import Refusal
from spmdrl.imports import refusing

_WORD = re.compile(r"\w+")
_K1 = 1.2
_B = 0.75


class Index:
    """An inverted index with BM25 scores.

    Source: Robertson and Zaragoza 2009, "The probabilistic relevance framework", eq. 3.15, with
    k1 = 1.2, b = 0.75 and the idf of Lucene, log(1 + (N - n + 0.5) / (n + 0.5)), which is never
    negative.

    Args:
        texts: one per document.
    """

    def __init__(self, texts: list[str]):
        # Arrays of machine integers, which take a fifth of the memory of lists of ints.
        self._documents: dict[str, array] = defaultdict(lambda: array("L"))
        self._counts: dict[str, array] = defaultdict(lambda: array("L"))
        lengths = []
        for i, text in enumerate(texts):
            words = Counter(_words(text))
            lengths.append(sum(words.values()))
            for word, count in words.items():
                self._documents[word].append(i)
                self._counts[word].append(count)
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        self._penalty = [_K1 * (1 - _B + _B * length / mean) for length in lengths]

    def search(self, query: str, *, count: int) -> list[tuple[int, float]]:
        """Return up to `count` (document, score) pairs, best first; ties in order of documents."""
        scores: dict[int, float] = defaultdict(float)
        total = len(self._penalty)
        # Sort the words: the order of a set differs between processes, and so would the rounding.
        for word in sorted(set(_words(query)) & self._documents.keys()):
            documents = self._documents[word]
            idf = math.log(1 + (total - len(documents) + 0.5) / (len(documents) + 0.5))
            for i, times in zip(documents, self._counts[word]):
                scores[i] += idf * times * (_K1 + 1) / (times + self._penalty[i])
        return heapq.nsmallest(count, scores.items(), key=lambda pair: (-pair[1], pair[0]))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class Search:
    """Returns the passages of a corpus that match a query best.

    Args:
        corpus: a JSONL file whose rows have `text`, and may have `title`. Every worker process
            holds it in memory.
        results: passages per query.
        max_chars: characters of a passage; the rest is cut off.
    """

    name = "search"

    def __init__(self, *, corpus: str, results: int = 3, max_chars: int = 600):
        if not Path(corpus).expanduser().is_file():
            raise Refusal(f"corpus: no such file {corpus!r} (looked from {Path.cwd()})")
        check_at_least(1, results=results, max_chars=max_chars)
        self.corpus = corpus
        self.results = results
        self.max_chars = max_chars

    def prepare(self) -> None:
        """Read the corpus and index it."""
        _corpus(self.corpus)

    def __call__(self, query: str) -> str:
        """Search a collection of texts and return the passages that match best.

        Args:
            query: A few words to look for.
        """
        titles, texts, index = _corpus(self.corpus)
        matches = index.search(query, count=self.results)
        if not matches:
            return "No passage matches."
        passages = [
            f"[{n}] {titles[i]}{texts[i][: self.max_chars]}"
            for n, (i, _) in enumerate(matches, start=1)
        ]
        return "\n\n".join(passages)


@functools.lru_cache(maxsize=4)
def _corpus(place: str) -> tuple[list[str], list[str], Index]:
    titles = []
    texts = []
    with Path(place).expanduser().open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            what = f"{place}:{number}: expected a JSON object with `text`"
            with refusing(what, json.JSONDecodeError, KeyError, TypeError, names_kind=True):
                row = json.loads(line)
                texts.append(str(row["text"]))
            titles.append(f"{row['title']}: " if row.get("title") else "")
    if not texts:
        raise Refusal(f"{place}: the corpus is empty")
    return titles, texts, Index([t + x for t, x in zip(titles, texts)])

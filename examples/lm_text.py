"""The text: bytes to train on, the last twentieth held out, and what counting achieves.

```
bytes  | ............. training, 95% ............. | held out, 5% |
step s   rank 0: BATCH random windows    rank 1: BATCH others
```
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
HELD_OUT_SHARE = 0.05
FEWEST_BYTES = 20_000
STDLIB_BYTES = 4_000_000
MOST_WINDOWS = 256

Batch = tuple[Tensor, Tensor]


class TextError(ValueError):
    """The text cannot be had, or there is too little of it."""


@dataclass(frozen=True)
class Corpus:
    """Bytes as integers, ``(n,)`` int64 each, and where they came from."""

    source: str
    train: Tensor
    held_out: Tensor

    def batch(
        self, size: int, context: int, *, seed: int, step: int, rank: int
    ) -> Batch:
        """Inputs and targets, ``(size, context)`` each, decided by the arguments alone.

        So any rank can ask for the batch of any other; the check replays all of them.
        """
        generator = torch.Generator().manual_seed(hash((seed, step, rank)))
        highest = len(self.train) - context
        starts = torch.randint(highest, (size, 1), generator=generator)
        windows = self.train[starts + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]

    def held_out_batches(
        self, size: int, context: int, *, rank: int, world_size: int
    ) -> Iterator[Batch]:
        """This rank's windows of the held-out text: as many batches on every rank.

        Equal numbers matter: each forward is collective. What does not divide is left
        out, and what comes after the first ``MOST_WINDOWS``, for the time it takes.
        """
        windows = min(MOST_WINDOWS, (len(self.held_out) - 1) // context)
        count = max(1, windows // world_size) * world_size
        chosen = self.held_out.unfold(0, context + 1, context)[:count]
        own = chosen[rank::world_size]
        for start in range(0, len(own), size):
            part = own[start : start + size]
            yield part[:, :-1], part[:, 1:]


def load_corpus(
    *, file: Path | None, stdlib: bool, windows: int, context: int
) -> Corpus:
    """Read ``file``, or the standard library's sources, or the prose of its manual.

    What is held out must make ``windows`` of ``context`` bytes: one for every rank.

    Raises: TextError, saying what to do instead.
    """
    if file is not None:
        source, text = str(file), _read(file)
    elif stdlib:
        source, text = "the standard library's sources", _standard_library()
    else:
        source, text = "the prose of pydoc_data/topics.py", _manual()
    fewest = max(FEWEST_BYTES, int((windows + 1) * context / HELD_OUT_SHARE))
    if len(text) < fewest:
        raise TextError(
            f"{source} has {len(text):,} bytes; at least {fewest:,} are needed "
            "to train on and to hold some out. Give a longer text, or leave out --text."
        )
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = len(values) - int(len(values) * HELD_OUT_SHARE)
    return Corpus(source, values[:cut], values[cut:])


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TextError(f"cannot read --text {file}: {error.strerror}.") from error


def _standard_library() -> bytes:
    folder = Path(sysconfig.get_path("stdlib"))
    parts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return b"\n".join(parts)[:STDLIB_BYTES]


def _manual() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise TextError(
            "this Python comes without pydoc_data; pass --stdlib or --text FILE."
        ) from error
    # The manual repeats itself: without dict.fromkeys, parts of what is held out would
    # stand in the training text as well.
    found = dict.fromkeys(p for topic in topics.values() for p in _prose(topic))
    return "\n\n".join(found).encode()


def _prose(topic: str) -> Iterator[str]:
    """Paragraphs of words, each on one line; grammar, tables and code are left out."""
    for paragraph in re.split(r"\n\s*\n", topic):
        line = " ".join(paragraph.split())
        wordy = sum(c.isalpha() or c in " .,'" for c in line)
        if len(line) > 60 and wordy > 0.9 * len(line):
            yield line


def counting_losses(corpus: Corpus) -> tuple[float, float]:
    """Held-out nats per byte of unigrams and of bigrams counted in the rest."""
    pairs = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    ones = torch.ones(len(corpus.train) - 1, dtype=torch.float64)
    pairs.index_put_((corpus.train[:-1], corpus.train[1:]), ones, accumulate=True)
    single = (pairs.sum(0) + 0.1) / (pairs.sum() + 0.1 * VOCABULARY)
    # A pair never seen falls back on how common its second byte is.
    double = (pairs + single) / (pairs.sum(1, keepdim=True) + 1)
    before, after = corpus.held_out[:-1], corpus.held_out[1:]
    unigram = -single[after].log().mean().item()
    bigram = -double[before, after].log().mean().item()
    return unigram, bigram

"""Text of an exact number of tokens, made of words that are one token each.

A tokenizer's vocabulary holds many whole words with a space before them, and its pre-tokenizer cuts at spaces, so that
a text of n such words is n tokens, whatever the words. Which words are safe is found out by encoding, not assumed.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import tokenizers

from bench.errors import BenchError
from bench.workloads.base import Literal, Synthetic, Text

_WORD = re.compile(r" [a-z]{2,}")
_FEWEST = 64  # different words that a tokenizer must have
_MOST = 8192  # words are tested in one go; more bring nothing
_PIECE = 512  # words that are drawn at once
_PIECES_KEPT = 4096
_TRIES = 64  # ways to cut a text before giving up


class TokenWords:
    """Texts for one tokenizer. `overhead`: tokens that it puts before every prompt, such as BOS."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.overhead = len(tokenizer.encode("").ids)
        self._words = self._safe_words()
        if len(self._words) < _FEWEST:
            raise BenchError(
                f"the tokenizer has {len(self._words)} lower-case words that are one token each; {_FEWEST} are needed "
                "to make prompts of exact length. Is it the tokenizer of the model?"
            )
        self._piece = lru_cache(_PIECES_KEPT)(self._draw)

    @classmethod
    def from_file(cls, path: Path) -> "TokenWords":
        """Of a tokenizer.json. Raises BenchError."""
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise BenchError(f"{path} is no tokenizer.json: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return cls(tokenizer)

    def count(self, text: str) -> int:
        """Tokens of a text, without the overhead."""
        return len(self._encode(text))

    def render(self, text: Text) -> str:
        """The text of all parts; a part with a length is exactly as many tokens.

        Raises BenchError for a literal that cannot be cut to its length.
        """
        return "".join(self._synthetic(part) if isinstance(part, Synthetic) else self._literal(part) for part in text)

    def _synthetic(self, part: Synthetic) -> str:
        pieces = [self._piece(part.seed, number) for number in range(-(-part.tokens // _PIECE))]
        words = [word for piece in pieces for word in piece]
        return "".join(words[: part.tokens])

    def _draw(self, seed: tuple[int, ...], number: int) -> list[str]:
        rng = np.random.default_rng((*(value % 2**64 for value in seed), number))
        words = self._words
        return [words[i] for i in rng.integers(0, len(words), _PIECE).tolist()]

    def _literal(self, part: Literal) -> str:
        """Cut, or filled up with words, until it encodes to its length: what is cut off may change the last tokens."""
        if not part.tokens:
            return part.text
        ids = self._encode(part.text)
        if len(ids) == part.tokens:
            return part.text
        for fewer in range(_TRIES):
            kept = min(len(ids), part.tokens - fewer)
            text = part.text if kept == len(ids) and not fewer else self._tokenizer.decode(ids[: max(kept, 0)])
            missing = part.tokens - self.count(text)
            if missing < 0:
                continue
            text += self._synthetic(Synthetic((len(part.text), part.tokens), missing))
            if self.count(text) == part.tokens:
                return text
        raise BenchError(f"cannot make a text of exactly {part.tokens} tokens of {part.text[:60]!r}")

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _safe_words(self) -> list[str]:
        """Words that are one token each, alone and after any other of them."""
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        decoded = (
            self._tokenizer.decode([0, number])[len(self._tokenizer.decode([0])) :]
            for number in range(self._tokenizer.get_vocab_size())
        )
        words = sorted({word for word in decoded if _WORD.fullmatch(word) and word.strip() not in added})
        rng = np.random.default_rng(0)
        if len(words) > _MOST:
            words = [words[i] for i in sorted(rng.choice(len(words), _MOST, replace=False).tolist())]
        # A word stands both after another and first in a text, where some tokenizers add or strip a space.
        words = [word for word in words if self.count(word) == 1]
        while words:
            order = rng.permutation(len(words)).tolist()
            lengths = self._token_lengths([words[i] for i in order])
            if lengths is None:
                return words
            words = sorted({words[i] for i in order} - lengths)
        return words

    def _token_lengths(self, words: list[str]) -> set[str] | None:
        """Words of a text that are not one token in it; None if all are."""
        text = "".join(words)
        ids = self._encode(text)
        if len(ids) == len(words):
            return None
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        bounds = set(_starts(words))
        wrong = {start for start, _ in encoding.offsets if start not in bounds and start + 1 not in bounds}
        ends = np.cumsum([len(word) for word in words])
        found = {words[int(np.searchsorted(ends, start, side="right"))] for start in wrong if start < ends[-1]}
        return found or set(words)


def _starts(words: Iterable[str]) -> list[int]:
    starts, at = [], 0
    for word in words:
        starts.append(at)
        at += len(word)
    return starts

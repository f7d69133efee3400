"""Text of an exact number of tokens, for one tokenizer.

Prompts are made of words that are one token each, wherever they stand: lowercase ASCII words that the vocabulary has
with the space before them, as byte-level and metaspace tokenizers do. So n words are n tokens, and the beginning of a
text stays the same tokens however long the text is.
"""

import hashlib
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers

from bench.errors import BenchError
from bench.workloads.base import Synthetic, Text

_WORD = re.compile("[Ġ▁][a-z]{3,}")  # how byte-level and metaspace vocabularies write a word after a space
_MOST, _FEWEST = 4096, 32  # words to choose from; powers of two, so that bits of a hash choose evenly
_FILL = (0xF111,)  # seed of the words that lengthen a text from a file


class TokenWords:
    """Renders texts for a tokenizer. `overhead`: tokens that open every prompt (BOS) and count with it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, add_bos: bool | None = None) -> None:
        """`add_bos`: whether a prompt opens with BOS; None: as the tokenizer does by itself.

        Raises BenchError for a tokenizer that has too few words of one token.
        """
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.overhead = self._opening() if add_bos is None else int(add_bos)
        words = self._find_words()
        if len(words) < _FEWEST:
            raise BenchError(
                f"only {len(words)} lowercase English words are one token for this tokenizer; "
                f"prompts of exact length need {_FEWEST}, so name the tokenizer of another model (--tokenizer)"
            )
        size = min(_MOST, 1 << (len(words).bit_length() - 1))
        self._words = [f" {word}" for word in words[:size]]
        # Some tokenizers put a space before every text; the first word of a prompt must not bring another.
        self._leads = self.count(self._words[0]) == 1

    @classmethod
    def from_file(cls, path: Path) -> "TokenWords":
        """For a tokenizer.json; a tokenizer_config.json beside it tells of BOS. Raises BenchError if it is none."""
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise BenchError(f"{path} is no tokenizer.json: {error}") from error
        config = _tokenizer_config(path.with_name("tokenizer_config.json"))
        add_bos = config.get("add_bos_token")
        try:
            return cls(tokenizer, add_bos and bool(config.get("bos_token")) if isinstance(add_bos, bool) else None)
        except BenchError as error:
            raise BenchError(f"{path}: {error}") from error

    def render(self, text: Text) -> str:
        """The text; each Synthetic part and each Literal with a length is exactly that many tokens.

        Literals are cut at their end or lengthened with words to get there, and lose white space at their end.
        """
        written = ""
        for part in text:
            if isinstance(part, Synthetic):
                written = self._append(written, part.seed, part.tokens)
            elif part.tokens:
                written = self._fit(written, part.text, part.tokens)
            else:
                written += part.text
        return written

    def count(self, text: str) -> int:
        """Tokens of a text, without those that open every prompt."""
        return len(self._encode(text).ids)

    def _encode(self, text: str) -> tokenizers.Encoding:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _append(self, written: str, seed: tuple[int, ...], tokens: int) -> str:
        """The text with so many words more. A hash whose output may be of any length chooses them.

        So a longer part of the same seed begins with the shorter one, today and with any version of any library.
        """
        bits = hashlib.shake_128(",".join(map(str, seed)).encode()).digest(2 * tokens)
        chosen = np.frombuffer(bits, dtype="<u2") % len(self._words)
        drawn = "".join(map(self._words.__getitem__, chosen.tolist()))
        return written + drawn if written or self._leads else drawn[1:]

    def _fit(self, before: str, text: str, tokens: int) -> str:
        """What stands before, then the text, cut or lengthened so that there are exactly `tokens` more tokens."""
        start = self.count(before) if before else 0
        goal = start + tokens
        text = text.rstrip()
        ends = [end - len(before) for _, end in self._encode(before + text).offsets]
        kept, step = min(goal, len(ends)), 1
        while True:
            # The text up to a token's end may be more tokens when it stands alone (a character cut in two), or fewer.
            cut = (text if kept == len(ends) else text[: max(0, ends[kept - 1])].rstrip()) if kept > start else ""
            missing = goal - self.count(before + cut)
            if missing >= 0:
                fitted = self._append(before + cut, _FILL, missing)
                if not missing or self.count(fitted) == goal:
                    return fitted
            if kept <= start:
                raise BenchError(f"this tokenizer cannot write {tokens} tokens after {before[-40:]!r}")
            kept, step = max(start, kept - step), 2 * step

    def _find_words(self) -> list[str]:
        """Words that are one token each after any other one, the vocabulary's first ones first.

        Chat templates may strip a message, so those are taken that are one token without the space, too, if there are
        enough.
        """
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        words = [token[1:] for token in sorted(vocabulary, key=vocabulary.__getitem__) if _WORD.fullmatch(token)]
        stripped = self._in_pieces([word for word in words if word in vocabulary], "\n", 2)
        found = self._in_pieces(stripped, " ", 1)
        return found if len(found) >= _FEWEST else self._in_pieces(words, " ", 1)

    def _in_pieces(self, words: list[str], glue: str, pieces: int) -> list[str]:
        """Those words that are so many tokens, the glue before them included, in a text of them all."""
        ends = list(accumulate(len(glue) + len(word) for word in words))
        offsets = self._encode("".join(glue + word for word in words)).offsets
        word_of_token = np.searchsorted(ends, [end for _, end in offsets])
        counts = np.bincount(word_of_token, minlength=len(words))
        return [word for word, tokens in zip(words, counts.tolist(), strict=False) if tokens == pieces]

    def _opening(self) -> int:
        """Tokens that the tokenizer itself puts before a text."""
        plain = self._encode("a").ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        return next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)


def _tokenizer_config(path: Path) -> dict[str, Any]:
    """The settings in a tokenizer_config.json, none if there is no such file. Raises BenchError if it is malformed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error

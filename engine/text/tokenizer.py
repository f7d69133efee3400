"""Text to token ids and back, from a folder's `tokenizer.json`. Without torch and transformers.

Text of users never turns into control tokens: what looks like a special token is encoded as plain characters. Only a
chat template inserts special tokens.
"""

import json
import re
import secrets
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from engine.config import ModelError

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CACHED_TOKENS = 1 << 16


class Tokenizer:
    """A tokenizer with the special tokens that its folder declares.

    The library is told to take the texts of special tokens for plain characters, always. To encode a template, each
    special token in it is first replaced by a marker that nobody can guess; the marker's id then becomes the token's.
    So the whole prompt is encoded in one go, with the ids that it has without markers.
    """

    def __init__(self, path: Path) -> None:
        """`path`: tokenizer.json. Raises ModelError if it is missing or malformed."""
        if not path.exists():
            raise ModelError(f"{path} is missing: only models with a fast tokenizer are supported")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} is not a tokenizer: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        special = {number: token for number, token in added.items() if token.special and token.content}
        config = tokenizer_config(path.parent)
        self.bos_token = token_text(config.get("bos_token"))
        self.eos_token = token_text(config.get("eos_token"))
        self.special_ids = frozenset(special)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # ids below are known
        self._added_ids = frozenset(added)
        self._decoder = str(self._tokenizer.decoder)
        self._tokenizer.encode_special_tokens = True
        self._start = self._start_ids(config.get("add_bos_token"))
        texts = sorted((token.content for token in special.values()), key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, texts)) or r"(?!)")  # the longest first, as the library
        self._beginnings = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self._longest_beginning = max(map(len, self._beginnings), default=0)
        self._marker_of, self._id_of_marker = self._add_markers(special)
        self.token_bytes = lru_cache(_CACHED_TOKENS)(self._token_bytes)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of a model folder."""
        return cls(folder / "tokenizer.json")

    def id_of(self, token: str | None) -> int | None:
        """Id of a token by its text."""
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Ids of a user's text, after the BOS token if the model wants one."""
        return self._start + self.encode_plain(text)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is special."""
        # A batch of one, since only batches can do without offsets, which take a quarter of the time.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_template(self, rendered: str, quoted: Mapping[str, str] | None = None) -> list[int]:
        """Ids of a rendered template, in which special tokens count.

        `quoted`: plain characters to their stand-in in `rendered`, as `quote` gave them; in them nothing counts.
        """
        text = self._special_text.sub(lambda match: self._marker_of[match[0]], rendered)
        if quoted:
            plain_of = {stand_in: plain for plain, stand_in in quoted.items()}
            text = re.sub("|".join(plain_of), lambda match: plain_of[match[0]], text)
        return [self._id_of_marker.get(number, number) for number in self.encode_plain(text)]

    def quote(self, text: str, quoted: dict[str, str]) -> str:
        """`text` with stand-ins for what would count in a template. Adds them to `quoted`, one for each special text.

        The beginning of a special token at the end is replaced, too, for a template may put the rest right behind it.
        """

        def stand_in(plain: str) -> str:
            return quoted.setdefault(plain, _secret())

        text = self._special_text.sub(lambda match: stand_in(match[0]), text)
        for length in range(min(len(text), self._longest_beginning), 0, -1):
            if text[-length:] in self._beginnings:
                return text[:-length] + stand_in(text[-length:])
        return text

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)

    @property
    def strips_leading_space(self) -> bool:
        """Whether decoding drops the space before the first word (SentencePiece style)."""
        return "ByteLevel" not in self._decoder and ("Strip" in self._decoder or "Metaspace" in self._decoder)

    # Inside

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token in running text: byte glyphs, byte fallback and word marks undone."""
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if "ByteLevel" in self._decoder:
            known = all(glyph in _BYTE_OF_GLYPH for glyph in token)
            return bytes(_BYTE_OF_GLYPH[glyph] for glyph in token) if known else token.encode()
        if "ByteFallback" in self._decoder and (match := _BYTE_FALLBACK.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token.replace("▁", " ") if "▁" in self._decoder else token).encode()

    def _start_ids(self, add_bos: object) -> list[int]:
        """What comes before a text: as tokenizer_config.json says, or else as the post-processor does it."""
        if isinstance(add_bos, bool):
            bos = self.id_of(self.bos_token) if add_bos else None
            return [] if bos is None else [bos]
        plain = self.encode_plain("a")
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(plain)] == plain), [])

    def _add_markers(self, special: Mapping[int, tokenizers.AddedToken]) -> tuple[dict[str, str], dict[int, int]]:
        """A marker for each special token, which takes in the white space around it as the token does."""
        marker_of = {token.content: _secret() for token in special.values()}
        self._tokenizer.add_tokens(
            [
                tokenizers.AddedToken(
                    marker_of[token.content],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                    normalized=False,
                    special=False,
                )
                for token in special.values()
            ]
        )
        ids = {number: self._tokenizer.token_to_id(marker_of[token.content]) for number, token in special.items()}
        return marker_of, {marker: number for number, marker in ids.items() if marker is not None}


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json, empty if there is none. Raises ModelError if it is malformed."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return config


def token_text(value: object) -> str | None:
    """A token of tokenizer_config.json, which writes it as text or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _secret() -> str:
    """Text that nobody can guess; digits, which a template's filters leave alone."""
    return f"{secrets.randbelow(10**40):040}"


def _glyphs() -> dict[str, int]:
    """Printable glyph of each byte in byte-level BPE (as in GPT-2) to the byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    glyphs = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return glyphs | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF_GLYPH = _glyphs()

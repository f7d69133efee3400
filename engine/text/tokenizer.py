"""Text to token ids and back, from a folder's `tokenizer.json`. Without torch and transformers.

Text of users never turns into control tokens: what looks like a special token is encoded as plain characters. Only a
chat template inserts special tokens.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from engine.config import ModelError


class Tokenizer:
    """A tokenizer with the special tokens that its folder declares."""

    def __init__(self, path: Path) -> None:
        """`path`: tokenizer.json. Raises ModelError if it is missing or malformed."""
        if not path.exists():
            raise ModelError(f"{path} is missing: only models with a fast tokenizer are supported")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} is not a tokenizer: {error}") from error
        config_path = path.parent / "tokenizer_config.json"
        config: dict[str, Any] = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
        self.bos_token = _token_text(config.get("bos_token"))
        self.eos_token = _token_text(config.get("eos_token"))
        self._add_bos = bool(config.get("add_bos_token", False)) and self.bos_token is not None
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._special_texts = [token.content for token in added.values() if token.special]
        self._decoder = str(json.loads(self._tokenizer.to_str()).get("decoder"))

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of a model folder."""
        return cls(folder / "tokenizer.json")

    @cached_property
    def vocab_size(self) -> int:
        """Ids below this one are known."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def id_of(self, token: str | None) -> int | None:
        """Id of a token by its text."""
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Ids of a user's text, after the BOS token if the model wants one."""
        bos = self.id_of(self.bos_token) if self._add_bos else None
        return ([bos] if bos is not None else []) + self.encode_plain(text)

    def encode_template(self, rendered: str) -> list[int]:
        """Ids of a template's own text, in which special tokens count."""
        return self._tokenizer.encode(rendered, add_special_tokens=False).ids

    def has_special_text(self, text: str) -> bool:
        """Whether the text of a special token stands in `text`."""
        return any(special in text for special in self._special_texts)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is special."""
        if not self.has_special_text(text):
            return self.encode_template(text)
        # The library finds special tokens before anything else; cut inside of each, it does not see them.
        ids: list[int] = []
        for piece in _cut(text, self._special_texts):
            ids += self.encode_template(piece)
        return ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token in running text: byte glyphs, byte fallback and word marks undone."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if "ByteLevel" in self._decoder:
            return bytes(_BYTE_OF_GLYPH[glyph] for glyph in token if glyph in _BYTE_OF_GLYPH)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @property
    def strips_leading_space(self) -> bool:
        """Whether decoding drops the space before the first word (SentencePiece style)."""
        return "ByteLevel" not in self._decoder and ("Strip" in self._decoder or "Metaspace" in self._decoder)


def _token_text(value: Any) -> str | None:
    """tokenizer_config.json writes a token as text or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _cut(text: str, specials: list[str]) -> list[str]:
    """`text` in pieces none of which holds one of `specials`."""
    for special in specials:
        at = text.find(special)
        if at >= 0:
            middle = at + max(1, len(special) // 2)
            return _cut(text[:middle], specials) + _cut(text[middle:], specials)
    return [text] if text else []


def _glyphs() -> dict[str, int]:
    """Printable glyph of each byte in byte-level BPE (as in GPT-2) to the byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    glyphs = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return glyphs | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF_GLYPH = _glyphs()

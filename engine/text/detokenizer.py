"""Token ids to text as they come, never half a character."""

import codecs
from collections.abc import Iterable

from engine.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of one output. The deltas of `push` and `flush` join to the text of all ids.

    It works on bytes: a character goes out with its last byte, so an emoji cut over tokens is held back until it is
    whole, and bytes that are no UTF-8 become U+FFFD as in a decoding of the whole.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = True) -> None:
        """`continues`: the text follows a prompt, so its first space is a space and not the start of a sentence."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._strip = tokenizer.strips_leading_space and not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The characters that these ids complete."""
        data = b"".join(
            self._tokenizer.token_bytes(token_id)
            for token_id in ids
            if not (self._skip_special and token_id in self._tokenizer.special_ids)
        )
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished."""
        return self._utf8.decode(b"", final=True)

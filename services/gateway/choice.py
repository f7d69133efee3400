"""One answer as the client sees it: token ids become text, stop strings end it, log probabilities follow their text.

The texts of the pieces of a choice join to its text exactly, also where a character spans several tokens or a stop
string cuts a token: a piece is told when the text that it completes is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine.request import TokenLogprob, TokenOutput
from engine.text.detokenizer import Detokenizer
from engine.text.stop import StopMatcher
from engine.text.tokenizer import Tokenizer
from services.gateway.validation import Options


@dataclass(slots=True)
class Piece:
    """One token: the text and bytes that it adds, and its log probability (none for a prompt's first token)."""

    token_id: int
    text: str
    data: bytes
    end: int  # where its text ends in the choice's text, in characters
    logprob: TokenLogprob | None


@dataclass(slots=True)
class Delta:
    """What a choice has gained."""

    text: str
    pieces: list[Piece]
    finish_reason: str | None


class Choice:
    """Turns the outputs of one sequence into text. `prompt_token_ids` are those to echo, if any."""

    def __init__(self, index: int, tokenizer: Tokenizer, options: Options, prompt_token_ids: list[int] | None) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.num_tokens = 0  # generated and told, those of a matched stop string included
        self.offset = 0  # characters of the text that the formatter has told of, for `text_offset`
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self._tokenizer = tokenizer
        self._options = options
        self._echo = prompt_token_ids
        self._detokenizer = Detokenizer(
            tokenizer, skip_special=options.skip_special_tokens, continues=prompt_token_ids is None
        )
        self._stop = StopMatcher(options.stop, include=options.include_stop)
        self._wants_pieces = options.sampling.logprobs is not None
        self._pending: deque[Piece] = deque()  # not told yet
        self._produced = 0  # characters of all pieces
        self._told = 0  # characters of all deltas

    def push(self, outputs: Iterable[TokenOutput]) -> Delta:
        """The outputs' effect. Nothing may be pushed once `finish_reason` is set."""
        text = ""
        for output in outputs:
            if output.prompt_logprobs is not None:
                self.prompt_logprobs = output.prompt_logprobs
            if self._echo is not None:
                text += self._echo_prompt(self._echo)
                self._echo = None
            hidden = output.stop_token_id is not None and not self._options.include_stop
            for position, token_id in enumerate(output.token_ids):
                logprob = output.logprobs[position] if output.logprobs else None
                last = position == len(output.token_ids) - 1
                text += self._push_token(token_id, logprob, hidden=hidden and last)
                if self.finish_reason is not None:
                    return self._delta(text)
            if output.finish_reason is not None:
                text += self._finish(output.finish_reason)
                break
        return self._delta(text)

    # Inside

    def _echo_prompt(self, token_ids: list[int]) -> str:
        text = ""
        scores = self.prompt_logprobs or []
        for position, token_id in enumerate(token_ids):
            text += self._detokenize(token_id, scores[position] if position < len(scores) else None)
        return text

    def _push_token(self, token_id: int, logprob: TokenLogprob | None, *, hidden: bool) -> str:
        """The text that may go out now. Ends the choice if a stop string is complete."""
        self.num_tokens += 1
        added = self._detokenize(token_id, logprob, hidden=hidden)
        if self.num_tokens < self._options.sampling.min_tokens:
            return added  # a stop string does not count yet
        text, stop = self._stop.push(added)
        if stop is not None:
            self.finish_reason = "stop"
        return text

    def _finish(self, reason: str) -> str:
        """The rest of the text, when the worker has ended the sequence."""
        tail = self._detokenizer.flush()
        self._produced += len(tail)
        if self._pending:
            self._pending[-1].text += tail
            self._pending[-1].end = self._produced
        text, stop = self._stop.push(tail)
        self.finish_reason = reason if stop is None else "stop"
        return text + self._stop.flush()

    def _detokenize(self, token_id: int, logprob: TokenLogprob | None, *, hidden: bool = False) -> str:
        """The text that a token adds. `hidden`: it adds none."""
        added = "" if hidden else self._detokenizer.push([token_id])
        self._produced += len(added)
        if self._wants_pieces:
            skipped = self._options.skip_special_tokens and token_id in self._tokenizer.special_ids
            data = b"" if hidden or skipped else self._tokenizer.token_bytes(token_id)
            self._pending.append(Piece(token_id, added, data, self._produced, logprob))
        return added

    def _delta(self, text: str) -> Delta:
        self._told += len(text)
        pieces = self._told_pieces() if self.finish_reason is None else self._last_pieces()
        return Delta(text, pieces, self.finish_reason)

    def _told_pieces(self) -> list[Piece]:
        """Pieces whose text is told; what may be the beginning of a character waits for its end."""
        count = 0
        for number, piece in enumerate(self._pending, 1):
            if piece.end > self._told:
                break
            if piece.text and piece.data == _whole_characters(piece.data):
                count = number
        return [self._pending.popleft() for _ in range(count)]

    def _last_pieces(self) -> list[Piece]:
        """All that are left; what a stop string has cut off is taken off them, too."""
        cut = False
        for piece in reversed(self._pending):
            if piece.end > self._told:
                piece.text = piece.text[: max(0, len(piece.text) - (piece.end - self._told))]
                piece.data = piece.text.encode()
                cut = not piece.text
            elif cut:
                piece.data = _whole_characters(piece.data)  # it may hold the beginning of what was cut off
                cut = not piece.text
        return list(self._pending)


def _whole_characters(data: bytes) -> bytes:
    """Without the beginning of an unfinished UTF-8 character at the end."""
    for length in range(1, min(3, len(data)) + 1):
        first = data[-length]
        if first >= 0xC0:
            needed = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            return data[:-length] if needed > length else data
        if first < 0x80:
            break
    return data

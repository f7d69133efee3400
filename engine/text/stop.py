"""Stop strings in a stream of text."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until one of `stop` is complete; holds back only what may be the beginning of one.

    The stop string that is complete first wins, and of several that end together the longest: the outcome does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """`include`: the matched string is part of the output."""
        self._stop = [text for text in stop if text]
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that can go out, matched stop string). After a match nothing more may be pushed."""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, at, stop = min(found)
            self._held = ""
            return text[: end if self._include else at], stop
        hold = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], None

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

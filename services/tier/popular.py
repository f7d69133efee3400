"""Which prefixes the KV service is asked for most, by hash."""

from collections import Counter

_MOST = 1024  # prefixes that are counted


class Popular:
    """Counts uses. A prefix that comes when there are too many takes the place, and the count, of the least used one.

    So no prefix has more uses than are told (Space-Saving; A. Metwally et al., ICDT 2005). Any thread may ask.
    """

    def __init__(self) -> None:
        self._uses: Counter[bytes] = Counter()
        self._tokens: dict[bytes, int] = {}

    def used(self, block_hash: bytes, tokens: int) -> None:
        """So many tokens, whose last block has this hash, were there."""
        if block_hash not in self._uses and len(self._uses) >= _MOST:
            least = min(self._uses, key=self._uses.__getitem__)
            self._uses[block_hash] = self._uses.pop(least)
            del self._tokens[least]
        self._uses[block_hash] += 1
        self._tokens[block_hash] = tokens

    def top(self, count: int) -> list[tuple[bytes, int, int]]:
        """Hash, tokens and uses, most used first."""
        return [(each, self._tokens.get(each, 0), uses) for each, uses in self._uses.copy().most_common(count)]

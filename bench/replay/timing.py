"""How long a step of the engine takes: an 8B Llama shape, bfloat16, on one H200.

Fitted by least relative squares to what the engine took there, `bench/results/2026-11-28-h100-h200.md` and
`2026-11-28-h200-1p1d.md`. Prompts: 24.3 ms for 1,024 tokens, 104 for 4,096 and 488 for 15,000 (H100s, which compute as
fast), 1.67 s for 32,000; the fit is within 7 %. Decodes with contexts of about 1,050 tokens: 4.32 ms for one, 5.94 for
24, 6.30 for 32, 15.9 for 256; within 6 %. A token's KV has 128 KiB.

A step with a prompt is bound by products, behind which the reading of the weights hides; so the larger of the two
counts. KV of decodes is read besides.
"""

import math
from dataclasses import dataclass

KV_BYTES = 131_072  # of a token


@dataclass(frozen=True, slots=True)
class Timing:
    """Coefficients, in seconds."""

    step: float = 4.54e-3  # base: the weights are read
    prompt_token: float = 22.0e-6
    prompt_token_context: float = 1.71e-9  # of a prompt's token, for each token before it
    sequence: float = 4.74e-6  # that decodes
    kept_token: float = 39.1e-9  # of KV of sequences that decode
    link_bytes: float = 100e9  # a second, between two workers
    link_latency: float = 5e-3  # from the last byte sent until it is committed: what was exposed on two H200s

    def mixed(self, tokens: int, products: float, sequences: int, kept: float) -> float:
        """A step of so many prompt tokens, whose contexts sum up to `products`, beside so many decodes."""
        return (
            max(self.step, self.prompt_token * tokens)
            + self.prompt_token_context * products
            + self.sequence * sequences
            + self.kept_token * kept
        )

    def decodes(self, steps: int, sequences: int, kept: float) -> float:
        """So many steps without prompts, in each of which every sequence keeps one token more."""
        first = self.step + self.sequence * sequences + self.kept_token * kept
        return steps * first + self.kept_token * sequences * steps * (steps - 1) / 2

    def steps_within(self, seconds: float, sequences: int, kept: float) -> int:
        """Of `decodes`: how many steps have begun once so much time is over; at least 1."""
        grows = self.kept_token * sequences / 2
        first = self.step + self.sequence * sequences + self.kept_token * kept - grows
        root = math.sqrt(first * first + 4 * grows * max(0.0, seconds))
        # The root of grows x steps^2 + first x steps = seconds, written so that nothing cancels out.
        return max(1, math.ceil(2 * max(0.0, seconds) / (first + root) - 1e-9))

    def prompt(self, start: int, end: int, chunk: int) -> float:
        """Tokens [start, end) of a prompt alone, in steps of `chunk`."""
        seconds = 0.0
        while start < end:
            count = min(chunk, end - start)
            seconds += self.mixed(count, count * (start + count / 2), 0, 0.0)
            start += count
        return seconds

    def transfer(self, tokens: int) -> float:
        """So many tokens' KV from one worker to another."""
        return self.link_latency + tokens * KV_BYTES / self.link_bytes

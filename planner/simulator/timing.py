"""How long a step of the engine takes: an 8B Llama shape, bfloat16, on one H200.

Fitted by least relative squares to what the engine took there, `bench/results/2026-11-28-h100-h200.md` and
`2026-11-28-h200-1p1d.md`. Prompts: 24.3 ms for 1,024 tokens, 104 for 4,096 and 488 for 15,000 (H100s, which compute as
fast), 1.67 s for 32,000; the fit is within 7 %. Decodes with contexts of about 1,050 tokens: 4.32 ms for one, 5.94 for
24, 6.30 for 32, 15.9 for 256; within 6 %. A token's KV has 128 KiB.

Host memory of the KV service: what restores took beyond hits on an H200 (`2026-11-29-tiers-h200.md`): 20.9 ms for 4,096
tokens, 31.8 for 8,192, 121 for 32,768; the fit is within 7 %. Of the tiers beneath only parts were measured: the disk
is the store of `2026-11-29-tier-disk.md`, on a virtual disk in its less busy run; Redis is no faster than TCP between
two processes (`2026-11-28-kv-bench-cpu.md`, 1.6 GB/s). Whoever has other media says so in a file of timings.

A step with a prompt is bound by products, behind which the reading of the weights hides; so the larger of the two
counts. KV of decodes is read besides. Where a step with a prompt has a constant of its own, beside its tokens, that is
`prompt_step`; what was fitted here needs none.
"""

import math

import msgspec


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients, in seconds."""

    step: float = 4.54e-3  # base: the weights are read
    prompt_step: float = 0.0  # of a step with prompts, beside their tokens
    prompt_token: float = 22.0e-6
    prompt_token_context: float = 1.71e-9  # of a prompt's token, for each token before it
    sequence: float = 4.74e-6  # that decodes
    kept_token: float = 39.1e-9  # of KV of sequences that decode
    request: float = 0.0  # of each prompt, before its first step: what a machine takes beyond steps and hops
    request_token: float = 0.0  # likewise of its tokens, which the gateway tokenises and hashes: no worker's time
    gateway_request: float = 0.0  # for each request, in which its gateway does nothing else; `request_token` besides
    gateway_token: float = 0.0  # likewise for each token of an answer
    token_bytes: float = 131_072  # of KV of a token
    link_bytes: float = 100e9  # a second, between two workers
    link_latency: float = 5e-3  # from the last byte sent until it is committed: what was exposed on two H200s
    host_bytes: float = 37e9  # a second, between each worker and the KV service's host memory
    host_latency: float = 5e-3  # as link_latency
    disk_read_bytes: float = 0.69e9  # a second
    disk_write_bytes: float = 0.73e9
    disk_latency: float = 1e-3  # of a batch of blocks
    redis_bytes: float = 1.6e9  # a second, both ways
    redis_latency: float = 1e-3
    reserve_waits: bool = False  # until the step is over that runs, as on a CPU: then alone is there room for KV

    def mixed(self, tokens: int, products: float, sequences: int, kept: float) -> float:
        """A step of so many prompt tokens, whose contexts sum up to `products`, beside so many decodes."""
        return (
            max(self.step, self.prompt_step + self.prompt_token * tokens)
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
        full, rest = divmod(max(0, end - start), chunk)
        seconds = full * self.mixed(chunk, 0.0, 0, 0.0) + (self.mixed(rest, 0.0, 0, 0.0) if rest else 0.0)
        return seconds + self.prompt_token_context * max(0, end * end - start * start) / 2

    def arrival(self, tokens: int) -> float:
        """From a client to the worker that computes the prompt, beyond hops, with nobody else on the way."""
        return self.request + self.request_token * tokens

    def transfer(self, tokens: int) -> float:
        """So many tokens' KV from one worker to another."""
        return self.link_latency + tokens * self.token_bytes / self.link_bytes

    def restore(self, tokens: int) -> float:
        """So many tokens' KV between a worker and the KV service's host memory."""
        return self.host_latency + tokens * self.token_bytes / self.host_bytes

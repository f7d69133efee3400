"""What a model's steps take on hardware where it was never measured: a roofline, and how near to one our engine comes.

GPUs are told by their makers' data sheets (NVIDIA A100 80GB SXM, H100 SXM, H200 SXM, B200 as of HGX B200, L40S): dense
products without sparsity, HBM or GDDR bandwidth, memory, and the network card that such machines have one of a GPU.

    a token of a prompt    2 x layers' parameters / FLOP/s; for each token before it 4 x layers x heads x head size
    a step                 bytes of all weights that are multiplied with / bandwidth
    a token of KV          its bytes / bandwidth

The shares of the limits that are reached were measured with an 8B Llama shape on H100s and H200s
(bench/results/2026-11-28-h100-h200.md), and so was what two ranks bring. `tandem profile` measures instead of guessing.
"""

import msgspec

from engine.config import ModelConfig
from planner.offer import Offer
from planner.simulator.timing import Timing

_PRODUCTS, _ATTENTION = 0.64, 0.31  # shares of the FLOP/s that prompts reach
_WEIGHTS, _KV = 0.75, 0.70  # shares of the bandwidth that decode steps reach; for weights H100s 0.81, H200s 0.72
_RANKS = 0.71  # of the speed that several GPUs have together: 4.42 ms on one, 3.10 on two
_MEMORY = 0.9  # share of a GPU's memory that an engine takes
_WIRE = 0.8  # share of a network card's rate


class Gpu(msgspec.Struct, frozen=True):
    """One card."""

    flops: float  # dense, bfloat16, a second
    bandwidth: float  # of its memory, bytes a second
    memory: float  # bytes
    network: float  # bytes a second, of its share of the machine's cards


GPUS = {
    "A100": Gpu(312e12, 2.039e12, 80e9, 25e9),
    "H100": Gpu(989e12, 3.35e12, 80e9, 50e9),
    "H200": Gpu(989e12, 4.8e12, 141e9, 50e9),
    "B200": Gpu(2250e12, 8.0e12, 180e9, 50e9),
    "L40S": Gpu(362e12, 0.864e12, 48e9, 25e9),
}


def prior(name: str, model: ModelConfig, tokens: int, degree: int | None = None) -> Offer:
    """A worker of so many cards of GPUS, in bfloat16; of the fewest with room for the weights and `tokens` of KV
    where `degree` is None: 1, 2, 4 or 8.

    Raises ValueError where there is no room, or the model's heads cannot be divided so.
    """
    gpu = GPUS[name]
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = model.hidden_size * (2 * heads + 2 * kv_heads + 3 * model.intermediate_size)
    layers, head = model.num_layers * layer, model.vocab_size * model.hidden_size
    stored = 2 * (layers + head * (1 if model.tie_word_embeddings else 2))
    token_bytes = 2 * 2 * model.num_layers * kv_heads
    for gpus in (1, 2, 4, 8) if degree is None else (degree,):
        room = gpus * _MEMORY * gpu.memory - stored
        divisible = not model.num_heads % gpus and not model.num_kv_heads % gpus
        if divisible and room >= tokens * token_bytes:
            break
    else:
        if model.num_heads % gpus or model.num_kv_heads % gpus:
            raise ValueError(
                f"{model.num_heads} heads, {model.num_kv_heads} of keys and values, cannot be divided among {gpus} GPUs"
            )
        raise ValueError(
            f"weights of {stored / 1e9:.0f} GB and KV of {tokens} tokens "
            f"have no room in {gpus} GPU{'s' if gpus > 1 else ''} of {gpu.memory / 1e9:.0f} GB"
        )
    speed = 1.0 if gpus == 1 else gpus * _RANKS
    flops, bandwidth = speed * gpu.flops, speed * gpu.bandwidth
    timing = Timing(
        step=2 * (layers + head) / (_WEIGHTS * bandwidth),
        prompt_token=2 * layers / (_PRODUCTS * flops),
        prompt_token_context=4 * model.num_layers * heads / (_ATTENTION * flops),
        kept_token=token_bytes / (_KV * bandwidth),
        token_bytes=token_bytes,
        link_bytes=_WIRE * gpus * gpu.network,
    )
    return Offer(gpu=name, gpus=gpus, timing=timing, kv_tokens=int(room / token_bytes))

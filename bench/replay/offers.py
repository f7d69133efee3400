"""Kinds of workers that a plan may use, as flags say them."""

from pathlib import Path

import msgspec

from bench.errors import BenchError
from bench.replay.simulated import profile_of, require_kv_tokens
from planner.offer import Offer
from planner.simulator.settings import Settings


def parse_degrees(text: str) -> list[int]:
    """Of "1,2,4"; none of an empty text. Raises BenchError."""
    try:
        found = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [0]
    if any(degree < 1 for degree in found):
        raise BenchError(f"--tensor-parallel {text!r} are no numbers of GPUs: give e.g. 1,2,4")
    return sorted(set(found))


def parse_prices(texts: list[str], names: list[str]) -> dict[str, float]:
    """Of "H100=2.49" or, where there is one card, "2.49". Raises BenchError."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            price = float(value)
        except ValueError:
            price = 0.0
        if not 1e-6 <= price <= 1e6:
            raise BenchError(f"--price {text[:80]!r} is no price: give what a GPU costs an hour, as H100=2.49")
        if not name and len(names) == 1:
            name = names[0]
        if name not in names:
            raise BenchError(f"--price {text!r} is of no card of --gpu: give one for each of {', '.join(names)}")
        found[name] = price
    if found and (missing := [name for name in names if name not in found]):
        raise BenchError(f"what does a {missing[0]} cost? With --price, give one for each of {', '.join(names)}")
    return found


def offers_of(
    kv_tokens: int | None, gpus: list[str], model: str, degrees: list[int], timings: list[Path], prices: list[str]
) -> list[Offer]:
    """At least one. `kv_tokens`: that each has, whatever would have room; None: what has room. Raises BenchError."""
    settings = Settings() if kv_tokens is None else Settings(kv_tokens=require_kv_tokens(kv_tokens))
    if timings and (gpus or model):
        raise BenchError("--timing says what steps take, and so does --gpu: give one of them")
    if timings:
        found = [_measured(settings, kv_tokens, path) for path in timings]
        if len({(each.gpu, each.gpus) for each in found}) < len(found):
            raise BenchError(
                'two files of --timing are of as many GPUs of one name: each says its own "gpus" and "gpu"'
            )
    elif gpus or model:
        found = _never_measured(kv_tokens, list(dict.fromkeys(gpus)), model, degrees)
    else:
        found = [settings.offer("aggregated")]
    if degrees and not gpus:
        raise BenchError("--tensor-parallel goes with --gpu; files of --timing say their own number of GPUs")
    told = parse_prices(prices, list(dict.fromkeys(each.gpu for each in found)))
    return [msgspec.structs.replace(each, price=told.get(each.gpu, 1.0)) for each in found]


def _measured(settings: Settings, kv_tokens: int | None, path: Path) -> Offer:
    profile = profile_of(path)
    return msgspec.structs.replace(
        settings.offer("aggregated"),
        gpu=profile.gpu,
        gpus=profile.gpus,
        timing=profile.timing,
        kv_tokens=require_kv_tokens(kv_tokens or profile.kv_tokens or settings.kv_tokens),
    )


def _never_measured(kv_tokens: int | None, gpus: list[str], model: str, degrees: list[int]) -> list[Offer]:
    from engine.config import ModelError, read_config
    from planner.priors import GPUS, prior
    from planner.shapes import SHAPES

    if not gpus or not model:
        raise BenchError("--gpu and --model belong together: a card, and a model's name or folder")
    if unknown := [name for name in gpus if name not in GPUS]:
        raise BenchError(f"--gpu {unknown[0]!r} is not known, but {', '.join(GPUS)}; `tandem profile` measures others")
    try:
        config = SHAPES[model] if model in SHAPES else read_config(Path(model))
    except ModelError as error:
        names = ", ".join(SHAPES)
        raise BenchError(f"--model {model}: neither a folder with a config.json ({error}) nor {names}") from None
    tokens = config.max_position_embeddings if kv_tokens is None else kv_tokens
    found, why = list[Offer](), ""
    for name in gpus:
        for degree in degrees or (None,):
            try:
                made = prior(name, config, tokens, degree)
            except ValueError as error:
                why = f"{model} on {name}: {error}"
                continue
            found.append(made if kv_tokens is None else msgspec.structs.replace(made, kv_tokens=kv_tokens))
    if not found:
        raise BenchError(why)
    return found

"""Which format the weights of a model get."""

import torch

from engine.config import ModelError
from engine.layers.decoder import Decoder
from engine.layers.linear import Linear
from engine.quantization.format import QuantisedFormat, UnpackedFormat
from engine.quantization.fp8 import Fp8, Fp8Reference
from engine.quantization.int8 import Int8
from engine.quantization.int8_cpu import Int8OnCpu, bytes_are_exact

_FP8_CAPABILITY = (8, 9)


def weight_format(stored: str | None, asked: str, dtype: torch.dtype, device: str) -> QuantisedFormat | None:
    """The format for weights that a checkpoint holds as `stored` (None: floats); `asked`: "auto", or the format's name.

    None: as the checkpoint's floats. Raises ModelError for what does not go together.
    """
    if stored is not None and asked not in ("auto", stored):
        raise ModelError(f"the checkpoint holds {stored} weights, which cannot become {asked}: leave quantization out")
    name = stored if asked == "auto" else asked
    if name is None:
        return None
    if name == "int8":
        if device != "cpu":
            return Int8()
        exact = dtype == torch.float32 and bytes_are_exact()
        return Int8OnCpu() if exact else UnpackedFormat("int8", torch.int8, dtype)
    if device == "cpu":
        return Fp8Reference(dtype)
    if dtype != torch.bfloat16:
        raise ModelError(f"fp8 weights are multiplied in bfloat16 on {device}, not {dtype}: set dtype to bfloat16")
    require_fp8(device)
    return Fp8()


def require_fp8(device: str) -> None:
    """Raises ModelError unless the device knows FP8 numbers."""
    if device != "cpu" and (found := torch.cuda.get_device_capability()) < _FP8_CAPABILITY:
        raise ModelError(
            f"fp8 needs a device of compute capability {_FP8_CAPABILITY[0]}.{_FP8_CAPABILITY[1]} or newer, this one "
            f"has {found[0]}.{found[1]}: serve without it"
        )


def quantise(model: Decoder, chosen: QuantisedFormat) -> None:
    """Gives the linear layers parameters of a format, before anything is loaded.

    The output has floats in any checkpoint, and its weight may be the embedding's: it is rounded when it is packed.
    """
    for layer in model.layers:
        for module in layer.modules():
            if isinstance(module, Linear):
                chosen.allocate(module)
    if chosen.includes_output and model.config.quantization is None:
        model.lm_head.format = chosen

"""What the `quantization_config` of a checkpoint says. Works without torch."""

from typing import Any, Literal

FormatName = Literal["fp8", "int8"]


def stored_format(config: dict[str, Any]) -> FormatName:
    """The format of the weights in a checkpoint. Raises ValueError for one that cannot be computed here.

    All that are served have, for each linear layer but the output, a weight of eight bits and a scale for the weight
    or for each of its rows. Scales that are stored for activations are not used: those of the very token are finer.
    """
    method = config.get("quant_method")
    if method == "fp8":
        name: FormatName = "fp8"
        _refuse(config.get("weight_block_size"), "weight_block_size")
        _refuse_left_out(config.get("modules_to_not_convert") or config.get("ignored_layers") or [])
    elif method == "compressed-tensors":
        name = _of_groups(config.get("config_groups"))
        _refuse(config.get("sparsity_config"), "sparsity_config")
        _refuse_left_out(config.get("ignore") or [])
    else:
        raise ValueError(
            f"checkpoints quantised by {method!r} are not supported; take one in fp8, or in eight bits by "
            "compressed-tensors, or one in bfloat16, which `quantization` can round while it is loaded"
        )
    return name


def _of_groups(groups: Any) -> FormatName:
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ValueError("`config_groups` must have one group: all linear layers quantised alike are supported")
    (group,) = groups.values()
    if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        raise ValueError('the targets of a group must be ["Linear"]')
    weights, activations = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or not isinstance(activations, dict):
        raise ValueError("`weights` and `input_activations` must both be quantised, to eight bits")
    kinds = {(part.get("type"), part.get("num_bits"), part.get("symmetric", True)) for part in (weights, activations)}
    if kinds not in ({("float", 8, True)}, {("int", 8, True)}):
        raise ValueError("weights and activations must both be symmetric floats or symmetric integers of eight bits")
    if weights.get("strategy") not in ("channel", "tensor"):
        raise ValueError(f"weights with scales by {weights.get('strategy')!r} are not supported, by channel or tensor")
    _refuse(group.get("output_activations"), "output_activations")
    return "fp8" if weights["type"] == "float" else "int8"


def _refuse(value: Any, name: str) -> None:
    if value:
        raise ValueError(f"`{name}` {value!r} is not supported")


def _refuse_left_out(modules: Any) -> None:
    """Only what is never quantised here may be left out: embedding, output and norms."""
    kept = ("lm_head", "embed_tokens", "norm")
    if left_out := [name for name in modules if not str(name).endswith(kept)]:
        raise ValueError(f"the module {left_out[0]!r} is not quantised, which is not supported for a linear layer")

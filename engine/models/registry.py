"""Which class serves which architecture. A new family is one file and one line here."""

from engine.config import ModelConfig, ModelError
from engine.layers.decoder import Decoder
from engine.models.llama import Llama
from engine.models.qwen2 import Qwen2
from engine.models.qwen3 import Qwen3

FAMILIES: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Llama,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
}


def model_class(config: ModelConfig) -> type[Decoder]:
    """The family of a configuration. Raises ModelError for one that is not known."""
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise ModelError(f"architecture {config.architecture!r} is not supported; these are: {', '.join(FAMILIES)}")
    return family

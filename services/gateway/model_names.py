"""The names under which requests may ask for the model: its own, and aliases."""

from services.config import ConfigError


def model_names(served: str, aliases: str) -> tuple[str, ...]:
    """`served` and its aliases, of ALIAS=MODEL, comma separated. Raises ConfigError."""
    names = [served]
    for text in filter(None, map(str.strip, aliases.split(","))):
        alias, equals, model = map(str.strip, text.partition("="))
        if not (alias and equals and model):
            raise ConfigError(f"model_aliases: {text!r} is not ALIAS=MODEL, as gpt-4o={served}")
        if model != served:
            raise ConfigError(f"model_aliases: {text!r} stands for {model!r}, but this cluster serves {served!r}")
        if alias in names:
            raise ConfigError(f"model_aliases: the name {alias!r} is given twice")
        names.append(alias)
    return tuple(names)

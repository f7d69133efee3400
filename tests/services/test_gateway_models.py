"""Models that a gateway serves, and the names under which requests ask for them."""

from pathlib import Path

import pytest

from services.config import ConfigError, GatewayConfig
from services.gateway.models import model_folders, model_names


def test_aliases_come_behind_the_models_own_names() -> None:
    assert model_names(["m"], "") == {"m": "m"}
    assert model_names(["m"], " gpt-4o = m,org/x:latest=m, ") == {"m": "m", "gpt-4o": "m", "org/x:latest": "m"}
    names = model_names(["m", "n"], "small=n,big=m")
    assert names == {"m": "m", "n": "n", "small": "n", "big": "m"} and list(names) == ["m", "n", "small", "big"]


@pytest.mark.parametrize(
    ("aliases", "what"),
    [
        ("a", "ALIAS=MODEL"),
        ("=m", "ALIAS=MODEL"),
        ("a=", "ALIAS=MODEL"),
        ("a=other", "serves m, n"),
        ("a=m,b=a", "serves m, n"),
        ("a=m,a=n", "twice"),
        ("n=m", "twice"),
    ],
)
def test_what_is_none_is_told(aliases: str, what: str) -> None:
    with pytest.raises(ConfigError, match="model_aliases") as error:
        model_names(["m", "n"], aliases)
    assert what in str(error.value)


def test_more_models_are_served_beside_the_first() -> None:
    config = GatewayConfig(model="/models/a", more_models="b=/models/of b, org/c = /models/c=1,")
    assert model_folders(config) == {
        "a": Path("/models/a"), "b": Path("/models/of b"), "org/c": Path("/models/c=1")
    }  # fmt: skip
    assert model_folders(GatewayConfig(model="/models/a", model_name="A")) == {"A": Path("/models/a")}


@pytest.mark.parametrize(
    ("more", "what"), [("b", "NAME=FOLDER"), ("b=", "NAME=FOLDER"), ("a=/x", "twice"), ("b=/x,b=/y", "twice")]
)
def test_wrong_more_models(more: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        model_folders(GatewayConfig(model="/models/a", more_models=more))

"""Names under which a model is served."""

import pytest

from services.config import ConfigError
from services.gateway.model_names import model_names


def test_aliases_come_behind_the_models_own_name() -> None:
    assert model_names("m", "") == ("m",)
    assert model_names("m", " gpt-4o = m,org/x:latest=m, ") == ("m", "gpt-4o", "org/x:latest")


@pytest.mark.parametrize(
    ("aliases", "what"),
    [
        ("a", "ALIAS=MODEL"),
        ("=m", "ALIAS=MODEL"),
        ("a=", "ALIAS=MODEL"),
        ("a=other", "serves 'm'"),
        ("a=m,a=m", "twice"),
        ("m=m", "twice"),
    ],
)
def test_what_is_none_is_told(aliases: str, what: str) -> None:
    with pytest.raises(ConfigError, match="model_aliases") as error:
        model_names("m", aliases)
    assert what in str(error.value)

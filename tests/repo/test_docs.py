"""The documents name every setting with its default, every field of the API and every metric."""

import re
from pathlib import Path

import msgspec
import pytest

from kv_transfer.states import RECEIVER, SENDER
from services.config import KINDS
from services.gateway.limits import LIMITS
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai_types import ChatRequest, CompletionRequest
from services.router.metrics import RouterMetrics
from services.tier.metrics import TierMetrics
from services.worker.metrics import WorkerMetrics

ROOT = Path(__file__).parents[2]
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
API = (ROOT / "docs/api.md").read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
TRANSFERS = (ROOT / "docs/transfers.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_documented(kind: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(kind):
        default = "" if field.default in ("", None) else f"`{field.default}` "
        assert f"\n| `{field.name}` | {default}|" in CONFIGURATION, field.name


def test_no_other_settings_are_documented() -> None:
    known = {field.name for kind in KINDS for field in msgspec.structs.fields(kind)}
    assert set(re.findall(r"^\| `([a-z0-9_]+)`", CONFIGURATION, re.MULTILINE)) == known


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_fields_are_documented(kind: type[msgspec.Struct]) -> None:
    assert [name for name in kind.__struct_fields__ if f"`{name}`" not in API] == []


@pytest.mark.parametrize(
    ("field", "limit"),
    [
        ("n", LIMITS.choices),
        ("prompt", LIMITS.prompts),
        ("prompt", LIMITS.sequences),
        ("stop", LIMITS.stops),
        ("stop", LIMITS.stop_chars),
        ("stop_token_ids", LIMITS.stop_token_ids),
        ("logit_bias", LIMITS.logit_bias),
        ("top_logprobs", LIMITS.logprobs),
        ("cache_salt", LIMITS.salt_chars),
    ],
)
def test_limits_are_documented(field: str, limit: int) -> None:
    (row,) = re.findall(rf"^\| `{field}` \|([^|]*)\|", API, re.MULTILINE)
    assert re.search(rf"\b{limit}\b", row)


@pytest.mark.parametrize("kind", [GatewayMetrics, RouterMetrics, WorkerMetrics, TierMetrics])
def test_metrics_are_documented(kind: type[GatewayMetrics | RouterMetrics | WorkerMetrics]) -> None:
    names = [family.name + ("_total" if family.type == "counter" else "") for family in kind().registry.collect()]
    assert [name for name in names if f"`{name}`" not in API] == []


@pytest.mark.parametrize("document", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_states_of_transfers_are_documented() -> None:
    """The tables of the document are those of the code."""
    for title, table in (("The decode side", RECEIVER), ("The prefill side", SENDER)):
        (section,) = re.findall(rf"## {title}\n(.*?)\n## ", TRANSFERS, re.DOTALL)
        rows = [
            f"| {state.value} | {event.value} | {after.value} |"
            for state, moves in table.items()
            for event, after in moves.items()
        ]
        assert re.findall(r"^\| [a-z].*\|$", section, re.MULTILINE) == ["| state | event | next |", *rows]
        final = ", ".join(state.value for state, moves in table.items() if not moves)
        assert f"Final: {final}." in section


def test_files_of_the_engine_are_documented() -> None:
    (section,) = re.findall(r"## The engine, file by file\n(.*?)\n## ", ARCHITECTURE, re.DOTALL)
    named = re.findall(r"`([a-z_0-9/]+\.py)`", section)
    files = [str(path.relative_to(ROOT / "engine")) for path in (ROOT / "engine").rglob("*.py")]
    assert sorted(named) == sorted(name for name in files if not name.endswith("__init__.py"))


def test_pictures_load_nothing_from_elsewhere() -> None:
    pictures = [path.read_text() for path in (ROOT / "docs/images").glob("*.svg")]
    assert pictures and not any(re.search(r"url\([^#]|href=|<script", text) for text in pictures)

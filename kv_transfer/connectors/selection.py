"""Which connector a pair of workers uses: the first of the receiver's offers that works here, with the reason."""

from collections.abc import Callable, Sequence

from kv_transfer.connectors.base import ConnectorError, SenderConnector


def choose(
    offers: Sequence[tuple[str, bytes]],
    open_connector: Callable[[str, bytes], SenderConnector],
    forced: str | None = None,
) -> tuple[str, SenderConnector, str]:
    """(kind, connector, reason). `offers` are (kind, description), best first. Raises ConnectorError if none works."""
    refused: list[str] = []
    for kind, description in offers:
        if forced is not None and kind != forced:
            refused.append(f"{kind}: {forced} is forced")
            continue
        try:
            connector = open_connector(kind, description)
        except ConnectorError as error:
            refused.append(f"{kind}: {error}")
            continue
        reason = "forced" if forced else "first choice" if not refused else "after " + "; ".join(refused)
        return kind, connector, reason
    raise ConnectorError("no connector works between the two workers: " + ("; ".join(refused) or "none was offered"))

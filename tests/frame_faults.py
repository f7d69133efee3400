"""Headers of KV frames that are off, the same for all connectors that send frames, and how each refusal is counted."""

from kv_transfer.references import BlockRef

D, L, BLOCKS, LAYERS, ROW = "d" * 32, "layout", 4, 2, 256
GENERATION = 3
REFS = [BlockRef(D, 0, GENERATION), BlockRef(D, 2, GENERATION)]


def ref(block_id: int = 0, generation: int = GENERATION, incarnation: str = D) -> list[BlockRef]:
    return [BlockRef(incarnation, block_id, generation)]


# What makes a good header for REFS one that is refused.
HEADER_FAULTS: list[tuple[dict[str, object], str]] = [
    ({"without": 1}, "malformed"),
    ({"format": 99}, "malformed"),
    ({"transfer_id": b"\xff\xfe"}, "malformed"),
    ({"checksum": -1, "layer": "x"}, "malformed"),
    ({"transfer_id": "other/0"}, "unexpected"),
    ({"transfer_id": "r/1"}, "unexpected"),
    ({"sequence": -1}, "repeated"),
    ({"sequence": 1}, "lost"),
    ({"layer": LAYERS}, "range"),
    ({"layer": -1}, "range"),
    ({"layer": 2**63}, "range"),
    ({"blocks": []}, "range"),
    ({"blocks": ref(-1)}, "range"),
    ({"blocks": ref(BLOCKS)}, "range"),
    ({"blocks": ref(2**64 - 1)}, "range"),
    ({"blocks": ref(generation=GENERATION - 1)}, "generation"),
    ({"blocks": ref(generation=2**64 - 1)}, "generation"),
    ({"blocks": ref(incarnation="e" * 32)}, "incarnation"),
    ({"blocks": ref(1)}, "foreign"),
    ({"payload": b""}, "length"),
    ({"payload": b"x" * (2 * ROW - 1)}, "length"),
    ({"payload": b"x" * (2 * ROW + 1)}, "length"),
]

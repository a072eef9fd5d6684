"""The connector that an engine is told to have. `kv_transfer` is imported only by an engine with one: aiohttp is a sixth of
its start."""

from typing import Literal

import msgspec

TRANSFER_PATH = "/kv_transfer"


class KvTransferConfig(msgspec.Struct, frozen=True):
    kv_connector: str
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"


def parse_kv_transfer_config(text: str) -> KvTransferConfig | None:
    """Empty: no connector. Raises ValueError."""
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=KvTransferConfig)
    except msgspec.DecodeError as error:
        raise ValueError(f"--kv-transfer-config: {error}") from error

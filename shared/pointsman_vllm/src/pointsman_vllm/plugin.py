"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process; an exception ends that process. The
scheduler needs no registration."""

import os

from pointsman_vllm.internals import unknown_internals
from pointsman_vllm.settings import eviction_settings

PART = "randomised eviction"


def register() -> None:
    """Installs what the environment requests. Without `POINTSMAN_VLLM_EVICTION=rlt` vLLM is not imported."""
    if eviction_settings(os.environ).eviction == "rlt":
        try:
            from pointsman_vllm import block_pool
        except ImportError as error:
            raise unknown_internals(PART, str(error)) from error
        block_pool.install()

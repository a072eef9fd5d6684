"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process that it starts.

What it raises ends that process, by vLLM's own doing; so a setting that does not fit, or a vLLM that does not, is a line
at the start of an engine that did not start. The scheduler needs no registration: `--scheduler-cls` names it.
"""

import os

from pointsman_vllm.internals import unknown_internals
from pointsman_vllm.settings import eviction_settings

PART = "randomised eviction"


def register() -> None:
    """Put in what the environment asks for. Without `POINTSMAN_VLLM_EVICTION=rlt` nothing of vLLM is even imported."""
    if eviction_settings(os.environ).eviction == "rlt":
        try:
            from pointsman_vllm import block_pool
        except ImportError as error:
            raise unknown_internals(PART, str(error)) from error
        block_pool.install()

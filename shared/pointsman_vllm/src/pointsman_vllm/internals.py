"""Checks the used vLLM internals before anything is replaced; the engine does not start if one is missing. A method
with another meaning is not detected; hence the list of tested versions."""

import inspect
import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

TESTED_VERSIONS = ("0.32.", "0.33.")

logger = logging.getLogger("vllm.pointsman")


class UnknownInternalsError(RuntimeError):
    pass


def require(part: str, owner: object, methods: Mapping[str, Iterable[str]]) -> None:
    """Check that methods exist with these parameters. Raises UnknownInternalsError."""
    for name, parameters in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            raise unknown_internals(part, f"{owner} has no {name}")
        known = inspect.signature(method).parameters
        missing = [parameter for parameter in parameters if parameter not in known]
        if missing:
            raise unknown_internals(part, f"{owner}.{name} does not take {', '.join(missing)}")


def require_nothing_more(part: str, theirs: type, ours: type) -> None:
    """Check that `ours` has all of `theirs`. Raises UnknownInternalsError."""
    missing = [name for name in vars(theirs) if not name.startswith("_") and not hasattr(ours, name)]
    if missing:
        raise unknown_internals(part, f"{theirs} has {', '.join(missing)}, which ours has not")


def warn_of_untested_version() -> None:
    if not vllm_version().startswith(TESTED_VERSIONS):
        logger.warning(
            "pointsman_vllm is tested with vLLM %s only, this is %s; every internal name it uses is there",
            " and ".join(f"{prefix}x" for prefix in TESTED_VERSIONS),
            vllm_version(),
        )


def vllm_version() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "unknown"


def unknown_internals(part: str, finding: str) -> UnknownInternalsError:
    return UnknownInternalsError(
        f"pointsman_vllm: {part} does not fit vLLM {vllm_version()}: {finding}. "
        f"Tested with {', '.join(f'{prefix}x' for prefix in TESTED_VERSIONS)}. Start the engine without it, or with such a vLLM."
    )

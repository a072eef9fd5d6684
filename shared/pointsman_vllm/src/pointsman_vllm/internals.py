"""What this package relies on inside vLLM, and the check that it is there.

vLLM promises nothing about the classes below, so each name and parameter that we use is looked for before anything
is replaced, and the engine does not start where one is missing. What the check cannot see is a method that has the same
name and means something else: hence the versions, which are those with which the tests on a real engine passed.
"""

import inspect
import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

TESTED_VERSIONS = ("0.32.",)

logger = logging.getLogger("vllm.pointsman")


class UnknownInternalsError(RuntimeError):
    """This vLLM is not built the way that we know."""


def require(part: str, owner: object, methods: Mapping[str, Iterable[str]]) -> None:
    """Each method of `owner` exists and has these parameters. Raises UnknownInternalsError."""
    for name, parameters in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            raise unknown_internals(part, f"{owner} has no {name}")
        known = inspect.signature(method).parameters
        missing = [parameter for parameter in parameters if parameter not in known]
        if missing:
            raise unknown_internals(part, f"{owner}.{name} does not take {', '.join(missing)}")


def require_nothing_more(part: str, theirs: type, ours: type) -> None:
    """Our stand-in can all that theirs can. Raises UnknownInternalsError."""
    missing = [name for name in vars(theirs) if not name.startswith("_") and not hasattr(ours, name)]
    if missing:
        raise unknown_internals(part, f"{theirs} has {', '.join(missing)}, which ours has not")


def warn_of_untested_version() -> None:
    """A line in the engine's log where nobody has tried this version."""
    if not vllm_version().startswith(TESTED_VERSIONS):
        logger.warning(
            "pointsman_vllm is tested with vLLM %s only, this is %s; every internal name it uses is there",
            " and ".join(f"{prefix}x" for prefix in TESTED_VERSIONS),
            vllm_version(),
        )


def vllm_version() -> str:
    """As installed; `unknown` where the installation does not say."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "unknown"


def unknown_internals(part: str, finding: str) -> UnknownInternalsError:
    """The error that says what to do."""
    return UnknownInternalsError(
        f"pointsman_vllm: {part} does not fit vLLM {vllm_version()}: {finding}. "
        f"Tested with {', '.join(f'{prefix}x' for prefix in TESTED_VERSIONS)}. Start the engine without it, or with such a vLLM."
    )

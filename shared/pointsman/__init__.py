"""The shared library: one fold over one log, and the pure policies that decide from it."""

from pointsman.optional_imports import without

# For coloured tracebacks, which our logs do not have: a tenth of the start of every process.
with without("rich"):
    import structlog  # noqa: F401

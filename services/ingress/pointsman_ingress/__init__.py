"""The ingress service."""

import pointsman  # noqa: F401 - before structlog

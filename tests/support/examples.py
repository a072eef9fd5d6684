"""How many examples a property gets that takes more or fewer than usual: all of them in `make fuzz`, a quarter in `make test`."""

from hypothesis import settings

SCALES = {"pointsman": 0.25, "check": 0.2}
"""By profile (tests/conftest.py); in every other, `fuzz` for one, a property gets all."""
FEWEST = 10
"""Less is not worth the start. A property that asks for less gets what it asks for."""


def examples(count: int) -> settings:
    """A decorator."""
    scaled = round(count * SCALES.get(settings.get_current_profile_name(), 1.0))
    return settings(max_examples=min(count, max(FEWEST, scaled)))

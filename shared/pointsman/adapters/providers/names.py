"""Names for instances that a provider starts: `scaled-1`, `scaled-2`, and so on; what is free again is used again."""

from collections.abc import Collection, Iterator
from itertools import count

from pointsman.primitives import InstanceId

PREFIX = "scaled-"


def free_names(taken: Collection[str]) -> Iterator[InstanceId]:
    """Unused names, lowest number first, without end."""
    for number in count(1):
        name = f"{PREFIX}{number}"
        if name not in taken:
            yield InstanceId(name)

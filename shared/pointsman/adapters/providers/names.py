"""Names of started instances: `scaled-1`, `scaled-2`, ...; free names are reused."""

from collections.abc import Collection, Iterator
from itertools import count

from pointsman.primitives import InstanceId

PREFIX = "scaled-"


def free_names(taken: Collection[str]) -> Iterator[InstanceId]:
    for number in count(1):
        name = f"{PREFIX}{number}"
        if name not in taken:
            yield InstanceId(name)

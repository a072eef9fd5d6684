"""What the plug-in does where vLLM is another, or is not there at all."""

from typing import Any

import pytest

from pointsman_vllm import plugin
from pointsman_vllm.internals import UnknownInternalsError, require, require_nothing_more


class Theirs:
    def known(self, block: Any) -> None: ...

    def new(self) -> None: ...

    def _own(self) -> None: ...


class PointsmanIndex:
    def known(self, block: Any) -> None: ...


def test_what_is_missing_in_vllm_is_named_before_anything_is_replaced() -> None:
    require("eviction", Theirs, {"known": ["block"], "new": []})

    with pytest.raises(UnknownInternalsError, match=r"eviction does not fit vLLM unknown: .*Theirs.* has no gone\."):
        require("eviction", Theirs, {"gone": []})
    with pytest.raises(UnknownInternalsError, match=r"Theirs.*\.known does not take request"):
        require("eviction", Theirs, {"known": ["block", "request"]})


def test_a_stand_in_must_be_able_to_do_all_that_the_original_can() -> None:
    require_nothing_more("eviction", PointsmanIndex, Theirs)

    with pytest.raises(UnknownInternalsError, match="has new, which ours has not"):
        require_nothing_more("eviction", Theirs, PointsmanIndex)


def test_without_a_setting_nothing_of_vllm_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POINTSMAN_VLLM_EVICTION", raising=False)
    plugin.register()

    monkeypatch.setenv("POINTSMAN_VLLM_EVICTION", "rlt")
    with pytest.raises(UnknownInternalsError, match="No module named 'vllm'"):
        plugin.register()

"""Which API key an engine is sent."""

import click
import pytest
from click.testing import CliRunner

from pointsman.runtime.engine_keys import EngineKeys, EngineKeySettings
from pointsman.runtime.settings import command


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("", {"gpu-1": ""}),
        ("sk-1", {"gpu-1": "sk-1", "": "sk-1"}),
        ("c2VjcmV0==", {"gpu-1": "c2VjcmV0=="}),
        ("abcd=", {"abcd": "abcd=", "gpu-1": "abcd="}),
        ("gpu-1=a,gpu-2=b", {"gpu-1": "a", "gpu-2": "b", "gpu-3": ""}),
        ("gpu-1=a, b\ngpu-2=c\n", {"gpu-1": "a", "gpu-2": "c", "gpu-3": "b"}),
        ("*=x,gpu-*=y,gpu-1=z,gpu-1-rank-*=r", {"gpu-1": "z", "gpu-2": "x", "gpu-1-rank-0": "x"}),
        ("gpu-1*=a,b", {"gpu-1": "a", "gpu-1-rank-3": "a", "gpu-2": "b"}),
        ("gpu-1=k=v==", {"gpu-1": "k=v=="}),
    ],
)
def test_an_engine_is_sent_the_key_of_its_name_then_of_a_pattern_then_of_any(text: str, keys: dict[str, str]) -> None:
    assert {instance: EngineKeys(text).of(instance) for instance in keys} == keys


@command(EngineKeySettings, name="asks-engines", table="worker")
def asks_engines(settings: EngineKeySettings) -> None:
    """Ask."""
    click.echo(settings.engine_keys.of("gpu-1"))


@pytest.mark.parametrize("text", ["GPU-1=hush", "a=hush,hush\N{SNOWMAN}", "hush,gpu-1=a,hush", "gpu-1=hush,gpu-1=hush"])
def test_what_is_no_list_of_keys_is_refused_and_not_shown(text: str) -> None:
    result = CliRunner().invoke(asks_engines, [], env={"POINTSMAN_ENGINE_API_KEY": text})

    assert result.exit_code == 2
    assert "number" in result.output
    assert "hush" not in result.output


def test_help_shows_no_key() -> None:
    result = CliRunner().invoke(asks_engines, ["--help"], env={"POINTSMAN_ENGINE_API_KEY": "gpu-1=hush"})

    assert "[INSTANCE=]KEY" in result.output
    assert "hush" not in result.output

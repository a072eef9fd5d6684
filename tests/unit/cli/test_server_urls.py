"""Commands that ask a server by HTTP."""

import pytest
from click.testing import CliRunner

from pointsman_cli.main import main


@pytest.mark.parametrize("words", [["calibrate"], ["bench", "--url"]])
@pytest.mark.parametrize("url", ["localhost:8000", "", "ftp://gpu-1:8000"])
def test_what_is_no_url_is_wrong_usage(words: list[str], url: str) -> None:
    result = CliRunner().invoke(main, [*words, url])

    assert result.exit_code == 2
    assert f"{url} is no URL like http://" in result.output

"""Which URLs an engine may have."""

import pytest

from pointsman.runtime.engine_urls import EngineUrls

LOOPBACK = EngineUrls()


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000",
        "http://127.9.9.9:1/",
        "http://localhost",
        "https://LOCALHOST:8443/a/b",
        "http://[::1]:80",
    ],
)
def test_by_default_engines_are_on_the_loopback(url: str) -> None:
    assert LOOPBACK.cover("engine-1", url)


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1:8000",
        "http://engine-1:8000",
        "http://127.0.0.1.evil.example",
        "http://localhost.evil.example",
        "http://127.0.0.1@evil.example",
        "http://evil.example#@127.0.0.1",
        "http://evil.example?127.0.0.1",
        "http://evil.example\\@127.0.0.1",
        "http://127.0.0.1:80@evil.example",
        " http://127.0.0.1",
        "http://127.0.0.1 ",
        "http://127.0.0.1\n",
        "http://127.0.0.1/../x?y",
        "http://127.0.0.1/%2e",
        "http://127.1",
        "http://0x7f000001",
        "http://2130706433",
        "http://[::ffff:10.0.0.1]",
        "ftp://127.0.0.1",
        "file:///etc/passwd",
        "//127.0.0.1",
        "127.0.0.1:8000",
        "",
    ],
)
def test_what_is_elsewhere_or_reads_in_two_ways_is_not(url: str) -> None:
    assert not LOOPBACK.cover("engine-1", url)


@pytest.mark.parametrize(
    ("pattern", "url", "covered"),
    [
        ("http://10.0.0.*:8000", "http://10.0.0.7:8000", True),
        ("http://10.0.0.*:8000", "http://10.0.0.7:8001", False),
        ("http://10.0.0.*:8000", "http://10.0.0.7.evil.example:8000", False),
        ("http://engine-*:*", "http://engine-12:9", True),
        ("http://engine-*:*", "http://engine-1.evil.example:9", False),
        ("http://engine-*", "http://engine-1", True),
        ("http://engine-*", "http://engine-1:80/", True),
        ("http://engine-*", "http://engine-1:8080", False),
        ("https://engine-1", "https://engine-1:0443", True),
        ("https://engine-1", "http://engine-1:443", False),
        ("http://*.gpu.svc:8000", "http://pod-3.gpu.svc:8000", True),
        ("http://*.gpu.svc:8000", "http://a.pod-3.gpu.svc:8000", False),
        ("http://*:8000", "http://anything.example:8000", True),
        ("http://*:8000", "http://[fd00::1]:8000", True),
        ("http://[fd00::1]:8000", "http://[FD00::1]:8000", True),
        ("http://host/llm", "http://host/llm/", True),
        ("http://host/llm", "http://host", False),
        ("http://host", "http://host/admin", False),
    ],
)
def test_a_pattern_covers(pattern: str, url: str, covered: bool) -> None:
    assert EngineUrls.of([pattern]).cover("engine-1", url) is covered


def test_a_pattern_given_excludes_the_loopback() -> None:
    assert not EngineUrls.of(["http://10.0.0.1"]).cover("engine-1", "http://127.0.0.1:8000")


def test_an_instance_that_is_named_has_no_other_url_and_lends_its_own_to_nobody() -> None:
    urls = EngineUrls.of(["engine-1=http://gpu-1:8000", "other-*=http://gpu-9:*", "http://gpu-2:8000"])

    assert urls.cover("engine-1", "http://gpu-1:8000")
    assert not urls.cover("engine-1", "http://gpu-2:8000")
    assert urls.cover("engine-2", "http://gpu-2:8000")
    assert not urls.cover("engine-2", "http://gpu-1:8000")
    assert urls.cover("other-7", "http://gpu-9:1")
    assert not urls.cover("other-7", "http://gpu-2:8000")


def test_an_instance_that_has_a_pattern_of_its_own_is_told_of_earlier_runs_and_others_of_the_option() -> None:
    urls = EngineUrls.of(["engine-1=http://127.0.0.1:8000", "http://127.0.0.1:*"])

    assert "an address of an earlier run" in urls.refusal("engine-1", "http://127.0.0.1:7000")
    assert "--engine-urls engine-2=http://gpu-2 if" in urls.refusal("engine-2", "http://gpu-2")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpu-1:8000",
        "http://",
        "http://a b",
        "http://a@b",
        "http://a?b",
        "=http://a",
        "A=http://a",
        "http://a:x",
        "ftp://a",
    ],
)
def test_what_is_no_pattern_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(ValueError, match="is not \\[INSTANCE=\\]URL"):
        EngineUrls.of([text])

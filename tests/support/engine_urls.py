"""Engine URLs for tests that allow every engine."""

from pointsman.runtime.engine_urls import EngineUrls

ANY_URL = EngineUrls.of(["http://*:*", "https://*:*"])

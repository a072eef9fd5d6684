"""Pictures of the console that pages show are those that `make screenshots` makes."""

import re

from tests.console.screenshots import BYTES_MAX, IMAGES, PICTURES, file_of
from tests.tidy.pages import PAGES

SHOWN = re.compile(r"images/(console-[a-z-]+\.png)")
PNG_MAGIC = b"\x89PNG"


def test_every_picture_is_made_by_the_command_and_shown_on_a_page() -> None:
    shown = {name for page in PAGES for name in SHOWN.findall(page.read_text())}
    made = {file_of(picture).name for picture in PICTURES}

    assert shown == made
    assert {file.name for file in IMAGES.glob("console-*.png")} == made


def test_pictures_are_small_enough_to_be_loaded_with_a_page() -> None:
    for picture in PICTURES:
        content = file_of(picture).read_bytes()
        assert content.startswith(PNG_MAGIC)
        assert len(content) <= BYTES_MAX, f"{file_of(picture).name}: {len(content)} bytes; run make screenshots"

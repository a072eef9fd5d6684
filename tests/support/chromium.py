"""Where Chromium is: named by POINTSMAN_CHROMIUM, installed, or Debian's, unpacked below .tools/ with all its libraries
(`python -m tests.support.chromium` does that, and prints the path)."""

import os
import shutil
from pathlib import Path

from tests.support.debian_programs import TOOLS, unpacked

PACKAGE, SUITE = "chromium-headless-shell", "bookworm"
FONTS = "fonts-dejavu-core"
INSTALLED = ("chromium", "chromium-browser", "google-chrome")
LAUNCHER = TOOLS / f"{PACKAGE}-{SUITE}" / "launcher"
ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage")
"""The sandbox needs rights that containers and root do not have; only our own pages are opened."""


def found_chromium() -> Path | None:
    named = os.environ.get("POINTSMAN_CHROMIUM")
    if named:
        return Path(named)
    installed = next(filter(None, map(shutil.which, INSTALLED)), None)
    if installed:
        return Path(installed)
    return LAUNCHER if LAUNCHER.exists() else None


def unpacked_chromium() -> Path:
    """Downloads 160 MB once."""
    root = unpacked(PACKAGE, SUITE, libraries=(FONTS,))
    if not LAUNCHER.exists():
        fonts = root / "fonts.conf"
        fonts.write_text(
            f"<fontconfig><dir>{root}/usr/share/fonts</dir><cachedir>{root}/fonts</cachedir></fontconfig>\n"
        )
        (program,) = (root / "usr/lib/chromium").glob("*headless*shell*")
        folders = ("lib/*-linux-gnu", "usr/lib/*-linux-gnu", "usr/lib/*-linux-gnu/pulseaudio")
        libraries = ":".join(str(path) for folder in folders for path in root.glob(folder))
        draft = LAUNCHER.with_suffix(".new")
        draft.write_text(
            f'#!/bin/sh\nexport LD_LIBRARY_PATH={libraries} FONTCONFIG_FILE={fonts}\nexec {program} "$@"\n'
        )
        draft.chmod(0o755)
        draft.rename(LAUNCHER)
    return LAUNCHER


if __name__ == "__main__":
    print(found_chromium() or unpacked_chromium())

"""Looks for known vulnerabilities of locked packages with pip-audit, and does not take silence for an answer: where its
database cannot be reached, pip-audit skips every package and reports that it found nothing. Exit codes: 0 none found, 1
some found, 2 nothing or not everything could be audited."""

import json
import subprocess
import sys
from pathlib import Path

COMMAND = ["-m", "pip_audit", "--disable-pip", "--require-hashes", "--progress-spinner", "off", "--format", "json"]
SECONDS_MAX = 900


def main(locks: list[str]) -> int:
    codes = [audited(lock) for lock in locks]
    return 1 if 1 in codes else max(codes)


def audited(lock: str) -> int:
    ran = subprocess.run(
        [sys.executable, *COMMAND, "--requirement", lock],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_MAX,
    )
    try:
        packages = json.loads(ran.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (ran.stderr.strip().splitlines() or ["no answer"])[-1]
        print(f"{lock}: NOT AUDITED: {reason}")
        return 2
    return verdict(Path(lock).name, packages)


def verdict(lock: str, packages: list[dict[str, object]]) -> int:
    skipped = [package for package in packages if "skip_reason" in package]
    found = [(package, flaw) for package in packages for flaw in package.get("vulns") or []]  # type: ignore[attr-defined]
    for package, flaw in found:
        fixed = ", ".join(flaw["fix_versions"]) or "no version"
        print(f"{lock}: {package['name']} {package['version']}: {flaw['id']}, fixed in {fixed}")
    if skipped:
        print(
            f"{lock}: NOT AUDITED: {len(skipped)} of {len(packages)} packages, for example: {skipped[0]['skip_reason']}"
        )
    else:
        print(f"{lock}: {len(packages)} packages, {len(found)} known vulnerabilities")
    return 1 if found else 2 if skipped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

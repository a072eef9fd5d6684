"""Builds a real kube-apiserver for tests, from Debian alone: the source of Kubernetes 1.20.2 in bookworm, which has its
dependencies, Go 1.19, and etcd from trixie. Takes six minutes of two processors and 3 GB below .tools/.

    python -m tests.support.kube_apiserver      # prints the directory, for KUBEBUILDER_ASSETS

A newer server is better where its release can be had; this one has no discovery.k8s.io/v1 (tests.support.kube_cluster)."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.debian_programs import TOOLS, apt, debian_program, unpacked

OLD, NEW = "bookworm", "trixie"
PROGRAM = "kube-apiserver"
VERSION = "v1.20.2"
IMPORTED = "k8s.io/kubernetes"
REFLECT = "github.com/modern-go/reflect2"
"""Of Debian instead of Kubernetes' copy, which crashes with Go after 1.17."""
BUILD_SECONDS_MAX = 3600


def built() -> Path:
    """The directory with kube-apiserver and etcd."""
    assets = TOOLS / PROGRAM
    if not (assets / PROGRAM).exists():
        assets.mkdir(parents=True, exist_ok=True)
        shutil.copy(debian_program("etcd", "etcd-server", NEW), assets / "etcd")
        _build(assets)
    return assets


def _build(assets: Path) -> None:
    top = TOOLS / "kubernetes-source"
    source = top / "src" / IMPORTED
    shutil.rmtree(top, ignore_errors=True)
    source.parent.mkdir(parents=True)
    apt(OLD, "source", "--download-only", "kubernetes", cwd=top, sources=True)
    original = next(top.glob("kubernetes_*.orig.tar.gz"))
    source.mkdir()
    subprocess.run(["tar", "xzf", original, "-C", source, "--strip-components=1"], check=True)
    ours = source / "vendor" / REFLECT
    shutil.rmtree(ours)
    debians = unpacked("golang-github-modern-go-reflect2-dev", OLD) / "usr/share/gocode/src" / REFLECT
    shutil.copytree(debians, ours, ignore=shutil.ignore_patterns("*_test.go"))
    go = _go(top)
    environment = {
        **os.environ, "GOROOT": str(go), "GOPATH": str(top), "GOCACHE": str(top / "cache"), "GO111MODULE": "off",
        "CGO_ENABLED": "0", "GOFLAGS": "",
    }  # fmt: skip

    def run(*command: str | Path) -> None:
        subprocess.run(command, cwd=source, env=environment, check=True, timeout=BUILD_SECONDS_MAX)

    generator = top / "openapi-gen"
    run(go / "bin/go", "build", "-o", generator, "./vendor/k8s.io/kube-openapi/cmd/openapi-gen")
    run(
        generator, "-h", "hack/boilerplate/boilerplate.generatego.txt", "--output-base", top / "src",
        "-i", ",".join(_described(source)), "-p", f"{IMPORTED}/pkg/generated/openapi", "-O", "zz_generated.openapi",
        "-r", top / "violations",
    )  # fmt: skip
    versions = [f"{place}k8s.io/component-base/version.gitVersion={VERSION}" for place in ("", f"{IMPORTED}/vendor/")]
    flags = " ".join(["-s -w", *(f"-X {version}" for version in versions)])
    run(go / "bin/go", "build", "-ldflags", flags, "-o", f"{assets}/", f"./cmd/{PROGRAM}")
    shutil.rmtree(top)


def _go(top: Path) -> Path:
    """GOROOT. Go's programs and its sources are two packages that share directories."""
    for package in ("golang-1.19-go", "golang-1.19-src"):
        shutil.copytree(unpacked(package, OLD) / "usr", top / "usr", symlinks=True, dirs_exist_ok=True)
    return top / "usr/lib/go-1.19"


def _described(source: Path) -> list[str]:
    """Packages whose types the server describes."""
    folders = [source / "pkg", source / "cmd", source / "plugin"]
    folders += [
        folder
        for folder in (source / "vendor/k8s.io").iterdir()
        if "sample-" not in folder.name and folder.name != "code-generator"
    ]
    found = set()
    for folder in folders:
        for file in folder.resolve().rglob("*.go") if folder.is_symlink() else folder.rglob("*.go"):
            if "testdata" not in file.parts and b"+k8s:openapi-gen=" in file.read_bytes():
                inside = file.parent.relative_to(folder.resolve() if folder.is_symlink() else folder)
                found.add(f"{IMPORTED}/{(folder / inside).relative_to(source)}")
    return sorted(found)


if __name__ == "__main__":
    print(built())

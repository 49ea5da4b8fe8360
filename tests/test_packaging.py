"""The distribution holds every package, and the links that static tools read point at the real folders."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = {package: ROOT / folder for package, folder in BUILD["package-dir"].items()}


def packages_on_disk() -> set[str]:
    return {
        ".".join((package, *init.parent.relative_to(folder).parts))
        for package, folder in FOLDERS.items()
        for init in folder.rglob("__init__.py")
        if not any(parent.is_symlink() for parent in init.parents)
    }


def test_every_package_is_listed() -> None:
    assert set(BUILD["packages"]) == packages_on_disk()


@pytest.mark.parametrize("package", sorted(set(FOLDERS) - {"agentspec"}))
def test_link_shows_the_folder_to_static_tools(package: str) -> None:
    link = ROOT / package.replace(".", "/")
    if link.is_file():
        pytest.skip("checkout without symlinks: only type checkers need them")
    assert link.is_symlink() and link.resolve() == FOLDERS[package]


HEAVY = ("torch", "triton", "transformers", "numba", "numpy", "redis", "starlette")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = f"import sys, agentspec, agentspec.types, agentspec.config; print([m for m in {HEAVY} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_server_imports_no_torch() -> None:
    code = (
        "import sys, agentspec.server.run; print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_pinned_versions_are_within_the_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = (*project["dependencies"], *extras["worker"], *extras["gpu"], *extras["dev"])
    asked = [Requirement(text) for text in named]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().split("==") for line in lines if "==" in line and not line.startswith("#"))
    pinned = {name.replace("_", "-"): version for name, version in pinned.items()}
    outside = [str(need) for need in asked if need.name in pinned and pinned[need.name] not in need.specifier]
    assert outside == []
    assert {need.name for need in asked} - set(pinned) == {project["name"]}

"""What a user gets: a wheel with every module and data file, under the one name `wmrl_embodied`.

Builds from a copy: setuptools leaves a `build` folder, whose stale files would end up in the next wheel.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
DATA = {"configs": "*.yaml", "evaluation": "*.j2"}
PLANTED = ["configs/planted.yaml", "configs/a/b/planted.yaml", "wmrl_embodied/evaluation/planted.j2"]


def folder_of(package):
    """Where a package lies in the repository; the longest mapped name decides, as in setuptools."""
    mapping = SETUPTOOLS["package-dir"]
    parent = max((name for name in mapping if f"{package}.".startswith(f"{name}.")), key=len)
    return Path(mapping[parent], *package.removeprefix(parent).split("."))


def run(*command, **environment):
    offline = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | offline | environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An empty folder into which the wheel, and nothing else, was installed."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "target"))
    for folder in set(SETUPTOOLS["package-dir"].values()):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / file).exists():
            shutil.copy(ROOT / file, source)
    for planted in (
        "configs/planted.yaml",
        "configs/a/b/planted.yaml",
        "wmrl_embodied/evaluation/planted.j2",
    ):
        (source / planted).parent.mkdir(parents=True, exist_ok=True)
        (source / planted).touch()
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", wheels, source)
    run(*pip, "install", "--no-deps", "--target", target, *wheels.glob("*.whl"))
    return target


def test_every_package_is_listed():
    listed = {folder_of(package) for package in SETUPTOOLS["packages"]}
    present = {
        path.parent.relative_to(ROOT)
        for folder in SETUPTOOLS["package-dir"].values()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert present == listed, "[tool.setuptools] packages in pyproject.toml"


def test_wheel_holds_every_module(installed):
    for package in SETUPTOOLS["packages"]:
        expected = {path.name for path in (ROOT / folder_of(package)).glob("*.py")}
        assert {path.name for path in (installed / package.replace(".", "/")).glob("*.py")} == expected, (
            package
        )


def test_wheel_holds_configs_and_templates(installed):
    for package, pattern in DATA.items():
        folder = ROOT / folder_of(f"wmrl_embodied.{package}")
        shipped = {
            str(path.relative_to(installed / "wmrl_embodied" / package))
            for path in (installed / "wmrl_embodied" / package).rglob(pattern)
        }
        assert shipped >= {str(path.relative_to(folder)) for path in folder.rglob(pattern)}
        assert any("planted" in name for name in shipped)
    assert (installed / "wmrl_embodied/configs/a/b/planted.yaml").exists()  # sub-folders without __init__.py


def test_wheel_brings_one_top_level_name(installed):
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names - {"bin"} == {"wmrl_embodied"}
    commands = {path.name for path in (installed / "bin").iterdir()}
    assert commands >= {"wmrl-sft", "wmrl-train", "wmrl-eval", "wmrl-report"}


@pytest.mark.parametrize("module", ["wmrl_embodied.envs.splits", "wmrl_embodied.core.types"])
def test_installed_module_imports(installed, tmp_path, module):
    code = f"import os; os.chdir({str(tmp_path)!r}); import {module}; print({module}.__file__)"
    output = run(sys.executable, "-P", "-c", code, PYTHONPATH=str(installed))
    assert Path(output.strip()).is_relative_to(installed)

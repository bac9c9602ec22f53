"""The floors: lower never imports higher, and the core imports no simulator, robot or language model."""

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
CORE_MAY_IMPORT = {"numpy", "safetensors", "sklearn", "torch", "wmrl_embodied", *sys.stdlib_module_names}


def lint_imports(tree):
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", ROOT / "pyproject.toml"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120)


def empty_packages(tree, importer, imported):
    """Every listed package, empty, but for one that imports another."""
    folders = [tree / package.replace(".", "/") for package in SETUPTOOLS["packages"]]
    for folder in (*folders, tree / "wmrl_embodied" / importer):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    (tree / "wmrl_embodied" / importer / "__init__.py").write_text(f"import wmrl_embodied.{imported}\n")
    return tree


def test_lower_floors_never_import_higher_ones(tmp_path):
    """On the tree as it installs, because import-linter does not see through `package-dir`."""
    for package, folder in SETUPTOOLS["package-dir"].items():
        shutil.copytree(
            ROOT / folder, tmp_path / package.replace(".", "/"), ignore=shutil.ignore_patterns("__pycache__")
        )
    result = lint_imports(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("core", "envs"),
        ("envs", "policies"),
        ("policies", "world_models"),
        ("world_models", "adapters"),
        ("adapters", "evaluation"),
        ("runtime", "cli"),
    ],
)
def test_a_floor_that_imports_what_it_must_not_is_named(tmp_path, importer, imported):
    result = lint_imports(empty_packages(tmp_path, importer, imported))
    assert result.returncode != 0
    complaint = f"wmrl_embodied.{importer} is not allowed to import wmrl_embodied.{imported}"
    assert complaint in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("importer", "imported"), [("cli", "envs"), ("evaluation", "runtime"), ("envs", "core")]
)
def test_a_floor_may_import_lower_ones(tmp_path, importer, imported):
    result = lint_imports(empty_packages(tmp_path, importer, imported))
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_package_without_a_floor_is_named(tmp_path):
    result = lint_imports(empty_packages(tmp_path, "new_room", "core"))
    assert result.returncode != 0
    assert "wmrl_embodied.new_room" in result.stdout


def imported_roots(path):
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0] if node.level == 0 else "wmrl_embodied"


def test_core_needs_torch_numpy_and_sklearn_only():
    files = [ROOT / "wmrl_embodied/__init__.py", *(ROOT / "wmrl_embodied/core").rglob("*.py")]
    imports = {str(path.relative_to(ROOT)): set(imported_roots(path)) for path in files}
    assert not {path: foreign for path, roots in imports.items() if (foreign := roots - CORE_MAY_IMPORT)}

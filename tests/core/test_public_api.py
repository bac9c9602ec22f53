"""The core's public names, and the libraries it may know."""

import ast
import sys
from pathlib import Path

import pytest

from wmrl_embodied import core

FILES = sorted(Path(core.__file__).parent.glob("*.py"))
MAY_IMPORT = {"torch", "numpy", "sklearn", "safetensors"}


def test_every_public_name_exists_and_is_listed_once():
    assert len(core.__all__) == len(set(core.__all__))
    assert all(hasattr(core, name) for name in core.__all__)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_core_knows_only_its_own_libraries(path):
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module)
    foreign = {
        name
        for name in modules
        if name.split(".")[0] not in MAY_IMPORT | sys.stdlib_module_names
        and not name.startswith("wmrl_embodied.core")
    }
    assert not foreign

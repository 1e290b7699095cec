"""Rules about modules: which imports are allowed, which code is pure, who reads the environment, what importing does.

The first half reads the source as text. The second half imports it in a fresh interpreter.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILE_LINES_MAX = 700

# The rooms, from the bottom to the top, and what each may import besides itself. A module belongs to the room with the
# longest name that begins its own.
BASE = {"baton.core", "baton.settings", "baton.protos"}
KV = {"baton.core", "baton.tritonlib", "baton.kvcache"}
SERVING = BASE | {"baton.security", "baton.rpc", "baton.metrics", "baton.tracing"}
MODEL_CONFIG = {"baton.models.config", "baton.models.families", "baton.models.loading"}
OF_STEPS = {"baton.engine.scheduling.slices", "baton.engine.speculation.limits"}  # `baton plan` simulates nodes with it
NODE = SERVING | MODEL_CONFIG | OF_STEPS | {"baton.kvcache", "kvtransfer", "baton.engine"}
MAY_IMPORT = {
    "baton.core": set[str](),
    "baton.protos": set[str](),
    "baton.settings": {"baton.core"},
    "baton.security": {"baton.core", "baton.settings"},
    "baton.rpc": BASE | {"baton.security"},
    "baton.client": BASE | {"baton.security", "baton.rpc"},
    "baton": {"baton.core", "baton.client"},  # the names for users; nothing imports it
    "baton.metrics": BASE | {"baton.rpc"},
    "baton.tracing": BASE | {"baton.metrics"},
    "baton.bounded": {"baton.core", "baton.settings"},
    "baton.grammar": {"baton.core", "baton.settings", "baton.bounded"},
    # what moves and computes KV
    "baton.tritonlib": {"baton.core"},
    "baton.kvcache": {"baton.core", "baton.tritonlib"},
    "attention": KV,
    "kvtransfer": {"baton.core", "baton.kvcache", "baton.settings"},
    # models
    "baton.models": set[str](),
    "baton.models.config": {"baton.core", "attention"},
    "baton.models.formats": {"baton.core", "baton.models.config"},
    "baton.models.checkpoint": {"baton.core", "baton.models.config", "baton.models.formats"},
    "baton.models.kernels": KV | {"attention", "baton.models.config", "baton.models.formats"},
    "baton.models.layers": KV | {"attention", "baton.models.config", "baton.models.formats", "baton.models.kernels"},
    "baton.models.families": KV
    | {"attention"}
    | {f"baton.models.{room}" for room in ("config", "formats", "checkpoint", "kernels", "layers")},
    "baton.models.quantization": KV
    | {"attention"}
    | {f"baton.models.{room}" for room in ("config", "formats", "checkpoint", "kernels", "layers", "families")},
    "baton.models.loading": KV
    | {"attention", "baton.settings"}
    | {
        f"baton.models.{room}"
        for room in ("config", "formats", "checkpoint", "kernels", "layers", "families", "quantization")
    },
    "baton.models.adapters": KV
    | {"attention"}
    | {f"baton.models.{room}" for room in ("config", "checkpoint", "kernels", "layers", "loading")},
    # nodes
    "baton.engine.scheduling.slices": {"baton.core"},
    "baton.engine.speculation.limits": set(),
    "baton.engine": KV
    | MODEL_CONFIG
    | OF_STEPS
    | {"attention", "baton.settings", "baton.grammar"}
    | {f"baton.models.{room}" for room in ("checkpoint", "kernels", "layers", "adapters")},
    "baton.node": NODE | {"baton.models.layers", "baton.models.adapters"},
    "prefill_node": NODE | {"baton.node", "decode_node"},  # it also decodes
    "decode_node": NODE | {"baton.node", "prefill_node"},  # `__main__` alone: the process may switch to the other role
    # the gateway
    "baton.gateway": {"baton.core", "baton.settings", "baton.gateway.process"},
    "baton.gateway.core": SERVING,
    "baton.gateway.text": SERVING | MODEL_CONFIG | {"baton.bounded", "baton.grammar", "baton.gateway.core"},
    "baton.gateway.fleet": SERVING | {"baton.gateway.core"},
    "baton.gateway.request": SERVING | {f"baton.gateway.{room}" for room in ("core", "text", "fleet")},
    "baton.gateway.observe": SERVING | {f"baton.gateway.{room}" for room in ("core", "fleet", "request")},
    "baton.gateway.serving": SERVING
    | {f"baton.gateway.{room}" for room in ("core", "text", "fleet", "request", "observe")},
    "baton.gateway.http": SERVING
    | {f"baton.gateway.{room}" for room in ("core", "text", "fleet", "request", "observe", "serving")},
    "baton.gateway.grpc": SERVING
    | {"baton.models.loading"}
    | {f"baton.gateway.{room}" for room in ("core", "fleet", "request", "serving", "http")},
    "baton.gateway.picker": SERVING | {f"baton.gateway.{room}" for room in ("fleet", "http")},
    "baton.gateway.process": SERVING
    | {"baton.models.loading"}
    | {f"baton.gateway.{room}" for room in ("core", "text", "request", "observe", "serving", "http", "grpc")},
    # tools
    "baton.cli": BASE | {"baton.security", "baton.rpc", "baton.client", "baton.gateway.text"},  # for doctor
    "baton.__main__": {"baton.core", "baton.cli"},
    "baton.load": BASE | {"baton.security", "baton.client", "baton.cli"},
    "baton.planner": BASE
    | {"baton.kvcache", "baton.rpc", "baton.load", "baton.cli", "baton.gateway.fleet"}
    | OF_STEPS
    | MODEL_CONFIG,
    "baton.training": set[str](),
}
PACKAGES = {"attention", "baton", "decode_node", "kvtransfer", "prefill_node"}
TOOLS = {"bench", "deploy", "docs", "tests"}

GRPC = {"grpc", "grpc_health", "grpc_reflection", "grpc_status"}
GRPC_IN = {
    "baton.client", "baton.rpc", "baton.security", "baton.node", "prefill_node", "decode_node", "baton.gateway.request",
    "baton.gateway.observe", "baton.gateway.grpc", "baton.gateway.picker", "baton.gateway.process",
}  # fmt: skip

WITH_TORCH = {"attention", "kvtransfer", "prefill_node", "decode_node"} | {
    f"baton.{room}" for room in ("tritonlib", "kvcache", "models", "grammar", "engine", "node", "training")
}
WITHOUT_TORCH_MODULES = OF_STEPS | {
    "baton.grammar.checker",
    "baton.grammar.trial",
    "baton.kvcache.layout",
    "baton.kvcache.spec",
    "kvtransfer.plan",
    "kvtransfer.segments",
    "kvtransfer.leases",
}

# Modules without clock, task, thread, socket, randomness or torch: events go in, commands come out.
PURE_MODULES = {
    "baton.core.block_keys",
    "baton.core.proxies",
    "baton.engine.events",
    "baton.engine.launch_pace",
    "baton.engine.scheduling.block_manager",
    "baton.engine.scheduling.scheduler",
    "baton.gateway.fleet.breaker",
    "baton.gateway.request.balance",
    "baton.gateway.request.smooth_start",
    "baton.gateway.fleet.cache_position",
    "baton.gateway.fleet.cache_union",
    "baton.gateway.fleet.discovery.endpoint_slices",
    "baton.gateway.fleet.node_table",
    "baton.gateway.fleet.node_view",
    "baton.gateway.fleet.prefix_index",
    "baton.gateway.fleet.router",
    "baton.gateway.fleet.second_token",
    "kvtransfer.leases",
    "kvtransfer.plan",
    "kvtransfer.segments",
    "baton.load.goals",
    "baton.load.metrics",
    "baton.load.records",
    "baton.load.search",
    "baton.load.sse",
}
PURE_NAMES = re.compile(
    r"(baton\.gateway\.(core|fleet|request)|prefill_node|decode_node)\.(machine|\w+_task|events|commands|fleet)"
)
IMPURE = {
    "asyncio", "concurrent", "datetime", "grpc", "multiprocessing", "queue", "random", "secrets", "signal", "socket",
    "subprocess", "threading", "time", "torch", "triton", "ucxx", "uuid",
}  # fmt: skip

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
READS_ENVIRONMENT = {"baton.settings.environment", "baton.settings.reader"}


@dataclass(frozen=True)
class Module:
    """One file of one package."""

    name: str
    path: Path

    @property
    def room(self) -> str:
        return room_of(self.name)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(), filename=str(self.path))

    @cached_property
    def imports(self) -> tuple[str, ...]:
        """Every module that it names in an import, at the top or inside of a function."""
        return tuple(self._imports())

    def _imports(self) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from self._imported_from(node)

    def _imported_from(self, node: ast.ImportFrom) -> Iterator[str]:
        assert node.level == 0, f"{self.name} has a relative import"
        source = node.module or ""
        for alias in node.names:
            # `from kvcache import layout` names a module, `from baton.kvcache.layout import parse_layout` does not.
            is_module = (ROOT / source.replace(".", "/") / f"{alias.name}.py").is_file()
            is_package = (ROOT / source.replace(".", "/") / alias.name / "__init__.py").is_file()
            yield f"{source}.{alias.name}" if is_module or is_package or _is_generated(alias.name) else source


def room_of(name: str) -> str:
    """The room of a module or package of ours."""
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    # The package `baton` itself has names for users, and no modules.
    return next(room for room in prefixes if room in MAY_IMPORT and (room != "baton" or name == "baton"))


def _is_generated(name: str) -> bool:
    return name.endswith(("_pb2", "_pb2_grpc"))


def _modules() -> tuple[Module, ...]:
    found = []
    for package in sorted(PACKAGES):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if not _is_generated(path.stem):
                found.append(Module(".".join(part for part in parts if part != "__init__"), path))
    return tuple(found)


MODULES = _modules()
MODULE_NAMES = {module.name for module in MODULES}


def test_every_package_has_its_rules() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} - TOOLS == PACKAGES
    rooms = {module.room for module in MODULES}
    assert rooms == set(MAY_IMPORT)


def test_rooms_have_an_order() -> None:
    """No room imports one that imports it, directly or through others, but for the two roles of a node."""
    assert {room for room in MAY_IMPORT if room in _reached(MAY_IMPORT, room)} == {"prefill_node", "decode_node"}


def test_imports_go_one_way() -> None:
    wrong = [
        f"{module.name} imports {name}"
        for module in MODULES
        for name in module.imports
        if name.partition(".")[0] in PACKAGES | TOOLS
        and (name.partition(".")[0] in TOOLS or room_of(name) not in MAY_IMPORT[module.room] | {module.room})
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside of functions and of `TYPE_CHECKING` count too: with them, no module can be read on its own."""
    graph = {module.name: set(_our_imports(module)) for module in MODULES}
    assert {name for name in graph if name in _reached(graph, name)} == set()


def test_the_pure_modules_import_nothing_impure() -> None:
    """Neither themselves nor through other modules of ours, so that a test can drive them with a list of events."""
    modules = {module.name: module for module in MODULES}
    graph = {name: set(_our_imports(module)) for name, module in modules.items()}
    pure = {name for name in modules if name in PURE_MODULES or PURE_NAMES.fullmatch(name)}
    assert pure >= PURE_MODULES
    wrong = [
        f"{name}: {reached} imports {imported}"
        for name in sorted(pure)
        for reached in sorted(_reached(graph, name) | {name})
        for imported in modules[reached].imports
        if imported.partition(".")[0] in IMPURE
    ]
    assert wrong == []


def _our_imports(module: Module) -> Iterator[str]:
    """The modules in MODULES that it imports."""
    return (name for name in module.imports if name in MODULE_NAMES and name != module.name)


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """What `start` imports, directly or through others; includes `start` if it is in a circle."""
    reached = set[str]()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(graph[name])
    return reached


def test_names_are_imported_from_the_module_that_defines_them() -> None:
    """A name has one home: no module re-exports a name that another one defines."""
    defined = {module.name: _defined_names(module.tree) for module in MODULES}
    users = [ROOT / name for name in ("bench", "docs", "tests")]
    trees = {module.name: module.tree for module in MODULES} | {
        str(path.relative_to(ROOT)): ast.parse(path.read_text()) for folder in users for path in folder.rglob("*.py")
    }
    wrong = [
        f"{name} imports {alias.name} from {node.module}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in defined
        for alias in node.names
        if alias.name not in defined[node.module]
        and f"{node.module}.{alias.name}" not in defined
        and not _is_generated(alias.name)
    ]
    assert wrong == []


def test_no_module_offers_the_names_of_another() -> None:
    wrong = [
        f"{module.name} offers {name}"
        for module in MODULES
        if module.name != "baton"
        for name in _offered_names(module.tree) - _defined_names(module.tree)
    ]
    assert wrong == []


def _defined_names(tree: ast.Module) -> set[str]:
    """The names that a module's own statements define; imported names are not among them."""
    names = set[str]()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
        else:
            waiting.extend(ast.iter_child_nodes(node))
    return names


def _offered_names(tree: ast.Module) -> set[str]:
    """What a module says it exports: names in `__all__`, and those imported as themselves."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.name for alias in node.names if alias.asname == alias.name)
        elif isinstance(node, ast.Assign) and any(
            isinstance(to, ast.Name) and to.id == "__all__" for to in node.targets
        ):
            names.update(ast.literal_eval(node.value))
    return names


def test_grpc_is_used_only_where_processes_meet() -> None:
    wrong = [
        f"{module.name} imports {name}"
        for module in MODULES
        if module.room not in GRPC_IN
        for name in module.imports
        if name.partition(".")[0] in GRPC or name.endswith("_pb2_grpc")
    ]
    assert wrong == []


def test_the_environment_is_read_in_one_place() -> None:
    wrong = [
        f"{module.name}:{line}"
        for module in MODULES
        if module.name not in READS_ENVIRONMENT
        for line in _lines_with_environment(module.tree)
    ]
    assert wrong == []


def _lines_with_environment(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
        else:
            continue
        if names & ENVIRONMENT:
            yield node.lineno


def test_no_state_hides_in_a_module() -> None:
    wrong = [f"{module.name}:{line}" for module in MODULES for line in _lines_with_state(module.tree)]
    assert wrong == []


def _lines_with_state(tree: ast.Module) -> Iterator[int]:
    """`global` statements, and cached functions without arguments, which are globals by another name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_arguments = node.args.args or node.args.kwonlyargs or node.args.posonlyargs
            if not has_arguments and any(_caches(decorator) for decorator in node.decorator_list):
                yield node.lineno


def _caches(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""
    return name in ("cache", "lru_cache")


def test_no_file_is_too_long_to_read_at_once() -> None:
    """A file of more than about 350 lines may hold two ideas. This limit is higher: a smaller one cut single ideas in
    two.
    """
    paths = [*(module.path for module in MODULES), *ROOT.glob("bench/**/*.py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert {path: count for path, count in lines.items() if count > FILE_LINES_MAX} == {}


def test_every_module_says_what_it_owns() -> None:
    assert [module.name for module in MODULES if ast.get_docstring(module.tree) is None] == []


# ---- what importing does

IMPORT_ALL = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
"""

BLOCK = """
import sys
for name in {names}:
    sys.modules[name] = None
"""

# Third-party modules are imported before the watch begins, so what they do does not count. After that, a thread start,
# a device query or a read of a variable is charged to the innermost of our frames on the stack, unless a third party's
# import is further in. Libraries read variables of their own when a class or message is defined, so only BATON_
# variables and direct reads count.
WATCH = """
import importlib, json, os, sys, threading
ours, theirs, roots = json.loads(sys.argv[1]), json.loads(sys.argv[2]), tuple(json.loads(sys.argv[3]))
for name in theirs:
    importlib.import_module(name)
import torch
seen = []
OF_THE_MAPPING = ("<frozen os>", "<frozen _collections_abc>", os.__file__)

def to_blame(*, at_once=False):
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(roots) and not path.endswith("_pb2.py"):
            return f"{path}:{frame.f_lineno}"
        if "importlib._bootstrap" in path or (at_once and path not in OF_THE_MAPPING):
            return None
        frame = frame.f_back
    return None

def watch(owner, name, what):
    real = getattr(owner, name)
    def watched(*args, **kwargs):
        where = to_blame()
        if where is not None:
            seen.append(f"{where} {what}")
        return real(*args, **kwargs)
    setattr(owner, name, watched)

def watch_environment(name):
    real = getattr(type(os.environ), name)
    def watched(self, *args):
        where = to_blame(at_once=not str(args[:1]).startswith("('BATON_"))
        if where is not None:
            seen.append(f"{where} touches the environment")
        return real(self, *args)
    setattr(type(os.environ), name, watched)

for name in ("__getitem__", "__iter__", "__len__", "__setitem__", "__delitem__"):
    watch_environment(name)
watch(threading.Thread, "start", "starts a thread")
for name in ("is_available", "device_count", "current_device", "init", "_lazy_init", "get_device_properties"):
    watch(torch.cuda, name, "asks for a device")
watch(torch, "set_num_threads", "sets the number of threads")

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
for name in ours:
    importlib.import_module(name)
if threads() != before:
    seen.append(f"{threads() - before} threads more than before")
if torch.cuda.is_initialized():
    seen.append("a device was initialized")
print(json.dumps(seen))
"""


def run_python(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        # A settings object that is made during import reads this.
        env=os.environ | {"BATON_LOG_LEVEL": "info"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_gateway_and_the_pure_parts_need_no_torch() -> None:
    names = [
        module.name
        for module in MODULES
        if not any(module.room == room or module.room.startswith(f"{room}.") for room in WITH_TORCH)
        or module.name in WITHOUT_TORCH_MODULES
    ]
    assert set(names) >= WITHOUT_TORCH_MODULES
    block = BLOCK.format(names=["torch", "transformers", "safetensors", "ucxx"])
    run_python(block + IMPORT_ALL, json.dumps(names))


def test_the_process_that_checks_grammars_is_small() -> None:
    """Each gateway process has one, with forks that a few grammars may end."""
    block = BLOCK.format(names=["torch", "transformers", "grpc", "google.protobuf", "pydantic", "asyncio"])
    run_python(block + IMPORT_ALL, '["baton.grammar.trial"]')


def test_the_process_that_renders_chat_templates_is_small() -> None:
    """As that of grammars. It has no need for what reads files of models and settings."""
    block = BLOCK.format(names=["torch", "transformers", "grpc", "google.protobuf", "pydantic", "tokenizers"])
    run_python(block + IMPORT_ALL, '["baton.gateway.text.chat.rendering"]')


def test_a_gateway_compiles_no_grammar_itself() -> None:
    """Nothing interrupts that, and it may end the process."""
    block = BLOCK.format(names=["baton.grammar.compiler", "baton.grammar.matcher", "baton.grammar.trial"])
    run_python(block + IMPORT_ALL, '["baton.gateway.process.start", "baton.gateway.process.worker"]')


@pytest.mark.slow
def test_importing_touches_no_device_no_variable_and_no_thread() -> None:
    """I7."""
    ours = [module.name for module in MODULES]
    theirs = sorted(
        {name for module in MODULES for name in module.imports if _is_third_party(name)}
        # Submodules that third-party modules load on first use.
        | {"google.protobuf.internal.builder", "torch.nn.functional"}
    )
    roots = [f"{ROOT / package}/" for package in PACKAGES]
    assert json.loads(run_python(WATCH, json.dumps(ours), json.dumps(theirs), json.dumps(roots))) == []


def _is_third_party(name: str) -> bool:
    top = name.partition(".")[0]
    return top not in PACKAGES and top not in sys.stdlib_module_names and top not in ("bench", "tests")


@pytest.mark.slow
def test_the_watch_sees_every_forbidden_act(tmp_path: Path) -> None:
    (tmp_path / "guilty.py").write_text(
        "import os, threading, torch\n"
        "os.environ.get('HOME')\n"
        "'HOME' in os.environ\n"
        "torch.cuda.is_available()\n"
        "threading.Thread(target=int, daemon=True).start()\n"
        "from baton.settings.gateway_config import GatewaySettings\n"
        "GatewaySettings()\n"
    )
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{WATCH}"
    theirs = json.dumps(["torch", "baton.settings.gateway_config"])
    seen = json.loads(run_python(program, '["guilty"]', theirs, json.dumps([f"{tmp_path}/"])))
    lines = {int(text.partition(" ")[0].rpartition(":")[2]) for text in seen if text.startswith(str(tmp_path))}
    assert lines == {2, 3, 4, 5, 7}

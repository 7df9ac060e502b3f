"""Which room may import which? The picture in the README, held in two ways.

By reading every file's imports, wherever in the file they stand; and by importing each room in a fresh process in which
what it must not need cannot be imported.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "megatron_packing"
ROOT = Path(__file__).parents[2]

# From the bottom up: a room may import the rooms named for it, and itself.
_GROUND = {"errors"}
_PLAIN = _GROUND | {"topology"}
_TENSORS = _PLAIN | {"config", "schedule", "data"}
_ALL_BELOW = _TENSORS | {"thd", "attention", "comm"}
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": _ALL_BELOW | {"mcore"},  # by name, on first use
    "errors": set(),
    "topology": _GROUND,
    "config": _PLAIN,
    "config_file": _GROUND,
    "schedule": _PLAIN,
    "data": _PLAIN,
    "attention": _GROUND,
    "thd": _TENSORS,
    "comm": _TENSORS | {"thd"},
    "mcore": _ALL_BELOW,
    "launch": _GROUND | {"config_file", "mcore"},
    "cli": _ALL_BELOW | {"config_file", "mcore", "launch"},
}

# Heavy packages, and the rooms that may import them.
ONLY_IN: dict[str, set[str]] = {
    "torch": {"thd", "attention", "comm", "mcore", "launch", "cli"},
    "torch.distributed": {"comm", "mcore"},
    "megatron": {"mcore"},
    "transformer_engine": {"mcore", "attention"},
    "apex": set(),  # the name on PyPI is an unrelated project
}


def imported_names(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports or reaches through `torch.`, absolute imports only."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield node.lineno, f"torch.{node.attr}"


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def violations(package_folder: Path) -> list[str]:
    """Imports in the package's files that cross a boundary, as `file:line: room -> name`."""
    found = []
    for path in sorted(package_folder.rglob("*.py")):
        room = path.relative_to(package_folder).parts[0].removesuffix(".py")
        for line, name in imported_names(path.read_text(encoding="utf-8")):
            where = f"{path.relative_to(package_folder)}:{line}: {room} -> {name}"
            if within(name, PACKAGE):
                target = name.split(".")[1] if "." in name else "__version__"
                if target not in {room, "__version__"} | MAY_IMPORT.get(room, set()):
                    found.append(where)
            elif any(within(name, heavy) and room not in rooms for heavy, rooms in ONLY_IN.items()):
                found.append(where)
    return found


def test_no_file_imports_across_a_boundary() -> None:
    assert violations(ROOT / PACKAGE) == []


def test_every_room_has_its_place_in_the_picture() -> None:
    rooms = {path.name.removesuffix(".py") for path in (ROOT / PACKAGE).iterdir() if path.name != "__pycache__"}
    assert rooms <= set(MAY_IMPORT)
    assert len(rooms) > 8


@pytest.mark.parametrize(
    ("file", "line", "crossing"),
    [
        ("schedule/bad.py", "import torch", "schedule -> torch"),
        ("schedule/bad.py", "from megatron_packing.data import Encoder", "schedule -> megatron_packing.data.Encoder"),
        ("schedule/bad.py", "from megatron.core import x", "schedule -> megatron.core.x"),
        ("data/bad.py", "def f():\n    import torch", "data -> torch"),
        ("data/bad.py", "import megatron_packing.schedule.plan", "data -> megatron_packing.schedule.plan"),
        ("thd/bad.py", "import torch.distributed as dist", "thd -> torch.distributed"),
        ("thd/bad.py", "from torch import distributed", "thd -> torch.distributed"),
        ("thd/bad.py", "import torch\ntorch.distributed.barrier()", "thd -> torch.distributed"),
        ("attention/bad.py", "from megatron_packing.thd import PackedBatch", "attention -> megatron_packing.thd"),
        ("comm/bad.py", "from megatron.core import parallel_state", "comm -> megatron.core.parallel_state"),
        ("launch.py", "from megatron.training import pretrain", "launch -> megatron.training.pretrain"),
        ("mcore/bad.py", "import apex", "mcore -> apex"),
        ("mcore/bad.py", "from megatron_packing import cli", "mcore -> megatron_packing.cli"),
        ("topology.py", "from megatron_packing.config import PackingConfig", "topology -> megatron_packing.config"),
        ("novel/bad.py", "from megatron_packing.errors import PackingError", "novel -> megatron_packing.errors"),
    ],
)
def test_the_reading_sees_a_crossing(tmp_path: Path, file: str, line: str, crossing: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import json\n{line}\n", encoding="utf-8")
    assert [crossing in found for found in violations(tmp_path)] == [True]


# --- fresh processes ------------------------------------------------------------------------------

# Reads steps from its argument; for each, forgets our package, forbids some modules and imports others.
_PROCESS = """
import importlib, json, sys

class Forbid:
    names = ()

    def find_spec(self, name, path=None, target=None):
        if any(name == f or name.startswith(f + ".") for f in self.names):
            raise ModuleNotFoundError(f"{name} is forbidden here", name=name)

forbid = Forbid()
sys.meta_path.insert(0, forbid)
answers = {}
for what, step in json.loads(sys.argv[1]).items():
    forbid.names = tuple(step["forbidden"])
    for name in list(sys.modules):
        if name.split(".")[0] == "megatron_packing" or any(name.startswith(f) for f in forbid.names):
            del sys.modules[name]
    before = set(sys.modules)
    try:
        exec(step["code"], {})
        error = None
    except ImportError as raised:
        error = str(raised)
    answers[what] = {"error": error, "loaded": sorted(set(sys.modules) - before)}
print(json.dumps(answers))
"""

_OURS = [f"{PACKAGE}.{room}" for room in MAY_IMPORT if room != "__init__"]


def all_but(*rooms: str) -> list[str]:
    """Our rooms except these."""
    return [name for name in _OURS if name not in {f"{PACKAGE}.{room}" for room in rooms}]


# Without numpy first, then without torch: once loaded they are not taken out again.
STEPS: dict[str, dict[str, Any]] = {
    "package": {"code": "import megatron_packing", "forbidden": []},
    "launch": {
        "code": "import megatron_packing.launch",
        "forbidden": ["torch", "megatron", "numpy", *all_but("launch", "errors")],
    },
    "schedule": {
        "code": "from megatron_packing import make_plan, Plan, Topology, CostModel; make_plan([3, 5])",
        "forbidden": ["torch", "megatron", *all_but("schedule", "topology", "errors")],
    },
    "data": {
        "code": "from megatron_packing import Conversation, Document, register_schema; import megatron_packing.data",
        "forbidden": ["torch", "megatron", *all_but("data", "topology", "errors")],
    },
    "settings": {
        "code": "import megatron_packing.config_file; from megatron_packing.config import PackingConfig as C, Topology;"
        "C(topology=Topology(), seq_length=4, scheduler='first_fit', max_tokens_per_rank=4)",
        "forbidden": ["torch", "megatron", *all_but("config", "config_file", "topology", "errors")],
    },
    "doctor": {
        "code": "import megatron_packing.cli.main, megatron_packing.mcore.verdicts as v; v.verdicts(v.Installed())",
        "forbidden": ["torch", "megatron"],
    },
    "schedule without what it needs": {"code": "import megatron_packing.schedule", "forbidden": ["numpy.typing"]},
    "thd without what it needs": {"code": "import megatron_packing.thd", "forbidden": ["torch"]},
    "thd": {
        "code": "import megatron_packing.thd.layout; from megatron_packing import PackedBatch",
        "forbidden": ["megatron", *all_but("thd", "config", "schedule", "data", "topology", "errors")],
    },
    "attention": {
        "code": "import megatron_packing.attention",
        "forbidden": ["megatron", *all_but("attention", "errors")],
    },
    "comm": {
        "code": "import megatron_packing.comm.exchange, megatron_packing.comm.failures, megatron_packing.comm.lengths",
        "forbidden": ["megatron", *all_but("comm", "thd", "config", "schedule", "data", "topology", "errors")],
    },
}
ALLOWED_STEPS = sorted(name for name in STEPS if "without" not in name)


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """One process for all steps: torch takes seconds to import."""
    found = subprocess.run(
        [sys.executable, "-c", _PROCESS, json.dumps(STEPS)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.parametrize("room", ALLOWED_STEPS)
def test_a_room_works_without_what_it_must_not_need(answers: dict[str, Any], room: str) -> None:
    assert answers[room]["error"] is None
    assert PACKAGE in answers[room]["loaded"]


@pytest.mark.parametrize("needed", ["numpy.typing", "torch"])
def test_the_process_sees_a_need(answers: dict[str, Any], needed: str) -> None:
    (step,) = (name for name in STEPS if "without" in name and STEPS[name]["forbidden"] == [needed])
    assert f"{needed} is forbidden here" in answers[step]["error"]


def test_the_package_alone_loads_nothing_but_itself(answers: dict[str, Any]) -> None:
    own = [name for name in answers["package"]["loaded"] if within(name, PACKAGE)]
    assert own == [PACKAGE]
    heavy = {"torch", "numpy", "megatron", "yaml", "orjson", "rich", "typer", "numba", "transformers"}
    assert not {name.split(".")[0] for name in answers["package"]["loaded"]} & heavy


def test_importing_the_package_loads_nothing_heavy() -> None:
    """What makes an import slow is what it loads: itself and the standard library, nothing that was installed."""
    code = f"""
import sys, sysconfig
before = set(sys.modules)
import {PACKAGE}
installed = sysconfig.get_path("purelib")
files = {{name: str(getattr(sys.modules[name], "__file__", "")) for name in set(sys.modules) - before}}
print(sorted(name for name, file in files.items() if installed in file and not name.startswith({PACKAGE!r})))
print(len(files))
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy, count = found.stdout.splitlines()
    assert heavy == "[]"
    assert int(count) < 60


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import megatron_packing

    with pytest.raises(AttributeError, match="has no attribute 'make_plans'"):
        megatron_packing.make_plans  # noqa: B018
    assert {"make_plan", "PackedBatch", "VarlenDataset"} <= set(dir(megatron_packing))

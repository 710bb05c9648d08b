"""The house: imports go down only, rooms are entered by their door, files stay short, and a name has one home."""

import ast
import importlib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# From the ground up; a room may import those on lower floors, and never one beside it.
FLOORS = (
    ("backbones",),
    ("utils",),
    ("config",),
    ("data", "modeling"),
    ("checkpoint", "evaluation", "progress", "solver"),
    ("visualization",),
    ("engine",),
    ("analysis", "export", "report", "sequence"),
    ("inference",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ROOMS = [room for room in FLOOR if room != "backbones"]
SOURCES = sorted(path for package in ("backbones", "projects_vil") for path in (ROOT / package).rglob("*.py"))
LONGEST = 500
MOST_FILES = 8


# What is imported from by the names of rooms and files.
NAMING = ("projects_vil", "backbones.attention")


def imported_modules(path: Path) -> list[str]:
    """Every module that a file imports, inside functions too."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
            # A room or a file of it may be what is imported: from projects_vil import data.
            modules += [f"{node.module}.{alias.name}" for alias in node.names if node.module in NAMING]
    return modules


# Rooms of a room, which have faces of their own.
EXPERIMENTS = [
    f"projects_vil.sequence.{path.name}"
    for path in sorted((ROOT / "projects_vil/sequence").iterdir())
    if path.is_dir() and path.name != "__pycache__"
]
# Of the files in backbones that are no part of a model on sequences, the room of sequences needs these alone.
UNDER_SEQUENCE = (
    "backbones.attention",
    "backbones.execution",
    "backbones.layers",
    "backbones.utils.conversion_report",
    "backbones.utils.errors",
)
# What each of the lower rooms in backbones needs of the others.
GROUND = {
    "backbones.utils": ("backbones.utils",),
    "backbones.execution": ("backbones.execution", "backbones.utils"),
    "backbones.layers": ("backbones.layers", "backbones.execution", "backbones.utils"),
    "backbones.attention.kernels": (
        "backbones.attention.kernels",
        "backbones.attention.reference",
        "backbones.execution",
        "backbones.utils",
    ),
}


def room_of(module: str) -> str | None:
    """``projects_vil.data.build`` -> ``data``; None outside of both packages and for ``projects_vil`` itself."""
    package, _, rest = module.partition(".")
    if package == "backbones":
        return "backbones"
    return (rest.partition(".")[0] or None) if package == "projects_vil" else None


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def identify(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_room_has_a_floor():
    rooms = {path.name for path in (ROOT / "projects_vil").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("path", SOURCES, ids=identify)
def test_imports_go_down_and_through_the_door(path):
    own = room_of(module_of(path))
    for module in imported_modules(path):
        room = room_of(module)
        if module == "projects_vil":
            continue
        if own == "backbones":
            assert module.split(".")[0] not in ("detectron2", "projects_vil"), module
        elif own is not None and room is not None and room != own:
            assert FLOOR[room] < FLOOR[own], f"{own} imports {module}: it is on the same floor or above"
            if room != "backbones":
                assert module == f"projects_vil.{room}", f"{own} imports {module}: the room's own face is its door"


@pytest.mark.parametrize("path", sorted((ROOT / "backbones").rglob("*.py")), ids=identify)
def test_sequences_have_a_room_of_their_own_in_backbones(path):
    own = module_of(path)
    for module in imported_modules(path):
        if own.startswith("backbones.sequence"):
            inside = module.startswith(("backbones.sequence.", *UNDER_SEQUENCE))
            assert inside or not module.startswith("backbones"), f"{own} imports {module}: it is no part of its ground"
        elif module.startswith("backbones.sequence"):
            # The one function for official weights stands beside that of the backbones.
            assert (own, module) == ("backbones.convert", "backbones.sequence.convert")


@pytest.mark.parametrize("room", GROUND)
def test_the_rooms_of_backbones_stand_on_each_other(room):
    for path in (path for path in SOURCES if module_of(path).startswith(room)):
        for module in imported_modules(path):
            is_named = not module.startswith("backbones") or module == "backbones.attention"
            assert is_named or module.startswith(GROUND[room]), f"{path}: {module}"


@pytest.mark.parametrize("path", sorted((ROOT / "tools").glob("*.py")), ids=identify)
def test_tools_enter_rooms_by_their_door(path):
    for module in imported_modules(path):
        if module.startswith("backbones.sequence"):
            assert module in ("backbones.sequence", "backbones.sequence.variants"), module
        if module.startswith("projects_vil."):
            assert module in (f"projects_vil.{room_of(module)}", *EXPERIMENTS), module


@pytest.mark.parametrize("path", SOURCES, ids=identify)
def test_no_file_is_long(path):
    assert len(path.read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES}), ids=identify)
def test_no_room_is_crowded(folder):
    assert len([path for path in SOURCES if path.parent == folder and path.name != "__init__.py"]) <= MOST_FILES


def test_every_name_is_exported_once():
    exported = Counter(name for room in ROOMS for name in importlib.import_module(f"projects_vil.{room}").__all__)
    assert [name for name, times in exported.items() if times > 1] == []


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_a_room_has_what_it_exports(room):
    module = importlib.import_module(f"projects_vil.{room}".rstrip("."))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_a_room_without_the_others_and_without_detectron2(name):
    for path in (path for path in SOURCES if module_of(path).startswith(name)):
        for module in imported_modules(path):
            assert module.split(".")[0] != "detectron2", f"{path}: {module}"
            inside = module == name or module.startswith((f"{name}.", "projects_vil.sequence.costs"))
            assert inside or not module.startswith("projects_vil.sequence"), f"{path}: {module}"
    module = importlib.import_module(name)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []

"""The house: what may import what."""

import ast
import pathlib

import morphax

SOURCE = pathlib.Path(morphax.__file__).parent
LAYERS = {
    "_version": 0,
    "_jax": 0,
    "errors": 0,
    "_operators": 1,
    "_value": 1,
    "_differentiation": 1,
    "_array_value": 1,
    "_events": 1,
    "primitives": 2,
    "_registry": 2,
    "_parts": 2,
    "_partwise": 2,
    "_tracer": 3,
    "_trace": 3,
    "_traits": 3,
    "_missing": 3,
    "_wrap": 4,
    "_checking": 4,
    "_coverage": 4,
    "_policy": 4,
    "_explain": 4,
    "rules": 5,
    "arrays": 6,
    "compat": 6,
    "__init__": 7,
}


def _modules():
    return {path: path.relative_to(SOURCE).parts for path in SOURCE.rglob("*.py")}


def _layer(parts):
    return LAYERS[parts[0].removesuffix(".py")]


def _imports(path, parts):
    """The package's modules that a file imports, by their first name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = len(parts) - node.level
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                yield parts[0] if above else name.split(".")[0]


def test_no_file_imports_from_a_higher_layer():
    """A file imports its own layer or a lower one."""
    for path, parts in _modules().items():
        for name in _imports(path, parts):
            assert LAYERS[name.removesuffix(".py")] <= _layer(parts), f"{path} imports {name}"


def test_every_file_has_a_layer():
    """A new file says where it belongs."""
    assert {parts[0].removesuffix(".py") for parts in _modules().values()} == set(LAYERS)


def test_only_one_file_imports_jax_internals():
    """And only it names a version of JAX."""
    for path, parts in _modules().items():
        text = path.read_text()
        if parts != ("_jax.py",):
            assert "jax._src" not in text, path
            assert "jax.__version__" not in text, path


def test_array_types_use_the_public_interface():
    """They prove that it suffices."""
    for path in (SOURCE / "arrays").glob("_*.py"):
        if path.name == "__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, path
                assert not (node.module or "").startswith("morphax."), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mx":
                assert not node.attr.startswith("_"), path


def test_the_top_level_holds_what_it_should():
    """Nothing else lies beside the sources."""
    root = SOURCE.parent.parent
    if not (root / "pyproject.toml").exists():  # installed elsewhere
        root = pathlib.Path(__file__).parent.parent
    allowed = {"pyproject.toml", "src", "tests", "examples", "docs", "CHANGELOG.md", "README.md", "LICENSE"}
    found = {
        p.name
        for p in root.iterdir()
        if not p.name.startswith(".") and p.name not in ("build", "dist", "quickstart.png")
    }
    assert found <= allowed


def test_py_typed_ships():
    """Type checkers read the annotations."""
    assert (SOURCE / "py.typed").exists()

"""Morphax: new kinds of array for JAX. Array-ish values run through unmodified code; see the README."""

from . import errors as errors
from . import primitives as primitives
from . import rules as _rules  # pyright: ignore[reportUnusedImport]  # the built-in treatment of JAX's own primitives
from ._array_value import ArrayValue as ArrayValue
from ._array_value import field as field
from ._array_value import register_type as register_type
from ._checking import checking as checking
from ._coverage import coverage as coverage
from ._explain import explain as explain
from ._parts import map_leaves as map_leaves
from ._policy import materialization as materialization
from ._registry import register as register
from ._traits import derive as derive
from ._value import aval_of as aval_of
from ._value import is_value as is_value
from ._value import materialize as materialize
from ._version import __version__ as __version__
from ._wrap import asarray as asarray
from ._wrap import dispatching as dispatching
from ._wrap import install as install
from ._wrap import uninstall as uninstall
from ._wrap import unwrap as unwrap
from ._wrap import wrap as wrap

# isort: split
from . import arrays as arrays  # they are written over the names above

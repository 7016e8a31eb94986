"""`ArrayValue`, the convenient base of array-ish types, and `register_type`, which admits any other class.

class Scaled(ArrayValue):
    array: Array
    factor: Array

    def __jax_array__(self):
        return self.array * self.factor
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, dataclass_transform

import jax
import jax.tree_util as jtu
import numpy as np

from . import _jax
from ._operators import Operators
from ._value import aval_of, flatten, is_value_type, lift, traced_aval
from .errors import FieldError, RegistrationError


def _lifting(author: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replace an author's `__jax_array__` by one that lifts: what JAX asks of a raw value, wherever it meets one."""

    @functools.wraps(author)
    def __jax_array__(self: Any):
        if type(self).__jax_array__ is not __jax_array__:
            return author(self)  # reached through `super()` by the author of a subclass
        if isinstance(self, Operators) and _jax.asked_by_operator():
            return self  # `array * value`: the operator finds no array and gives way to `__rmul__`
        return lift(self)

    __jax_array__.author = author  # type: ignore[attr-defined]
    return __jax_array__


def register_type(cls: type) -> type:
    """Let instances of ``cls`` dispatch wherever JAX meets them: captured, nested, in a rule.

    An argument of `wrap` needs no registration, and naming a class in a rule's annotations implies it. Usable as a
    decorator.

    Args:
        cls: A class with `__jax_array__`.

    Returns:
        ``cls``, whose `__jax_array__` now lifts. The author's own is what `materialize` calls.

    Raises:
        RegistrationError: If ``cls`` is no class, is an array type, or has no `__jax_array__`.
    """
    if not isinstance(cls, type) or not is_value_type(cls):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RegistrationError(
            f"`register_type` takes a class whose instances stand for an array, and {cls!r} has no `__jax_array__` method "
            "(or is an array type of JAX or NumPy itself). Give it `def __jax_array__(self): return ...`."
        )
    if not hasattr(cls.__jax_array__, "author"):  # type: ignore[attr-defined]
        cls.__jax_array__ = _lifting(cls.__jax_array__)  # type: ignore[attr-defined]
    _jax.register_array_type(cls, lift, aval_of)
    return cls


def field(*, static: bool = False, **kwargs: Any) -> Any:
    """Declare a field of an `ArrayValue`.

    Args:
        static: Whether the field is metadata, part of the value's structure, and no array. It must be hashable.
        **kwargs: As `dataclasses.field`.
    """
    metadata = dict(kwargs.pop("metadata", None) or {})
    return dataclasses.field(metadata={**metadata, "static": static}, **kwargs)


class _Shadow:
    """Hides an inherited property behind a field of the same name (a type may have a field ``shape``)."""

    def __get__(self, instance: Any, owner: type) -> Any:
        raise AttributeError


def _shadow_properties(cls: type) -> None:
    for name in inspect.get_annotations(cls):
        if name not in cls.__dict__ and isinstance(getattr(ArrayValue, name, None), property):
            setattr(cls, name, _Shadow())


def _checked_init(init: Callable[..., Any], static: tuple[str, ...], fields: tuple[str, ...]) -> Callable[..., Any]:
    """Run what has to hold of a new instance after its own `__init__`, and not after those it calls through `super()`."""

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any):
        init(self, *args, **kwargs)
        if type(self).__init__ is not __init__:
            return
        for name in fields:
            if not hasattr(self, name):
                raise FieldError(
                    f"`{type(self).__name__}.__init__` did not set the field {name!r}: add `self.{name} = ...`."
                )
        for name in static:
            _check_static(self, name)
        for cls in reversed(type(self).__mro__):
            if "__check_init__" in cls.__dict__:
                cls.__check_init__(self)  # type: ignore[attr-defined]

    return __init__


def _check_static(value: Any, name: str) -> None:
    held = getattr(value, name)
    kind = type(value).__name__
    if any(isinstance(x, (jax.Array, np.ndarray)) for x in jtu.tree_leaves(held)):
        raise FieldError(
            f"the static field {name!r} of `{kind}` holds an array. Static fields are compared and hashed whenever JAX looks "
            f"up a compiled program, and arrays cannot be: declare it `{name}: Array`, without `static=True`, or store a "
            "tuple of numbers."
        )
    try:
        hash(held)
    except TypeError as error:
        raise FieldError(
            f"the static field {name!r} of `{kind}` holds a `{type(held).__name__}`, which is not hashable, and JAX looks up "
            "compiled programs by it. Store a tuple in place of a list, or a frozen dataclass in place of a dictionary."
        ) from error


class Shaped:
    """Shape and dtype of a value, as those of an array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return aval_of(self).shape

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return aval_of(self).dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions of the array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the array."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass_transform(frozen_default=True, field_specifiers=(field, dataclasses.field))
class ArrayValue(Shaped, Operators):
    """Base of array-ish types: a frozen dataclass and a pytree that stands for an array.

    A subclass lists its arrays as annotated fields, and metadata as fields with `field(static=True)`. It defines
    `__jax_array__`, the dense array that it stands for, and may override `aval` to give shape and dtype without computing
    it. It may write its own `__init__` (each field may be set once) and `__check_init__`; neither runs when JAX rebuilds an
    instance.

    Class attributes that a type may set:

    * ``linear = True``: the array is linear in the floating leaves. Found out by tracing `__jax_array__` where that works.
    * ``cotangent(self, ct)``: for a linear type, a value of the cotangents of its leaves.
    * ``take_leading(self, i)`` and ``add_leading(self, n)``: the slice at a (traced) index along the leading axis, and the value
      that leaves stacked ``n`` times along a new one stand for; for loops over values whose leaves do not show it.
    * ``from_array(array, like)``, a static method: the value that an array stands for beside ``like``, whose leaves tell only
      their types; for an array that a loop turns into a value (a zero that becomes a length).
    * ``default(primitive, operands, params)``, a static method: what to do where no rule fits.
    """

    linear: Any = None
    _has_only: Callable[[Any, set[type]], bool]  # whether its fields are of these types; written for each class

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own_init = "__init__" in cls.__dict__
        _shadow_properties(cls)  # before, so that no property is taken for a field's default
        inherited_init = not own_init and getattr(cls.__init__, "by_hand", False)
        dataclasses.dataclass(frozen=True, eq=False, repr=False, init=not (own_init or inherited_init))(cls)
        _shadow_properties(cls)  # after, where a field specifier was removed again
        del cls.__setattr__, cls.__delattr__  # ours allow a hand-written `__init__` to set each field once
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        for f in fields:
            if f.metadata.get("converter") is not None:
                raise FieldError(
                    f"the field {f.name!r} of `{cls.__name__}` asks for a converter, which an `ArrayValue` does not run. "
                    "Convert in a hand-written `__init__`."
                )
        static = tuple(f.name for f in fields if f.metadata.get("static", False))
        names = tuple(f.name for f in fields if f.name not in static)
        if own_init or static or hasattr(cls, "__check_init__"):
            must_set = (*names, *static) if own_init or inherited_init else ()
            cls.__init__ = _checked_init(cls.__init__, static, must_set)  # type: ignore[method-assign]
            cls.__init__.by_hand = own_init or inherited_init  # type: ignore[attr-defined]
        _register_pytree(cls, names, static)
        if "__jax_array__" in cls.__dict__:
            cls.__jax_array__ = _lifting(cls.__jax_array__)  # type: ignore[method-assign]
        if hasattr(cls, "__jax_array__"):
            register_type(cls)

    aval = traced_aval

    @property
    def nbytes(self) -> int:
        """The bytes that the value's own arrays take (not those of the array that it stands for)."""
        return sum(np.dtype(x.dtype).itemsize * x.size for x in flatten(self)[0])

    def __setattr__(self, name: str, x: Any) -> None:
        if name in type(self).__dataclass_fields__ and name not in self.__dict__:  # type: ignore[attr-defined]
            self.__dict__[name] = x
            return
        raise dataclasses.FrozenInstanceError(
            f"cannot set {name!r} of a `{type(self).__name__}`: values are immutable. Use `dataclasses.replace(x, {name}=...)`."
        )

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(
            f"cannot delete {name!r} of a `{type(self).__name__}`: values are immutable."
        )

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{f.name}={_short(getattr(self, f.name, None))}' for f in fields)})"


def _short(x: Any) -> str:
    if isinstance(x, (jax.Array, np.ndarray)) and hasattr(x, "shape"):
        return f"{x.dtype}{list(x.shape)}"
    return repr(x)


def _register_pytree(cls: type, names: tuple[str, ...], static: tuple[str, ...]) -> None:
    keys = tuple(jtu.GetAttrKey(name) for name in names)
    flatten_value, unflatten, cls._has_only = _written_functions(cls, names, static)  # type: ignore[attr-defined]

    def flatten_with_keys(value: Any):
        children, metadata = flatten_value(value)
        return tuple(zip(keys, children, strict=True)), metadata

    jtu.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten_value)


def _written_functions(cls: type, names: tuple[str, ...], static: tuple[str, ...]) -> list[Callable[..., Any]]:
    """Write functions for the fields of a class, as `dataclasses` writes its `__init__`.

    Every call of a jitted function runs the first two on each value, every operation on values the third. Loops over the
    names in them take 0.9 us longer, a third of the call.
    """
    children, metadata = (_tuple(f"value.{name}" for name in group) for group in (names, static))
    fill = "".join(
        f"    {_tuple(f'fields[{name!r}]' for name in group)} = {given}\n"
        for group, given in ((names, "children"), (static, "metadata"))
        if group
    )
    found = " and ".join(f"type(value.{name}) in types" for name in names) or "True"
    source = (
        f"def flatten_value(value):\n    return {children}, {metadata}\n"
        f"def unflatten(metadata, children):\n    value = new(cls)\n    fields = value.__dict__\n{fill}    return value\n"
        f"def has_only(value, types):\n    return {found}\n"
    )
    namespace: dict[str, Any] = {"cls": cls, "new": object.__new__}
    exec(source, namespace)
    return [namespace["flatten_value"], namespace["unflatten"], namespace["has_only"]]


def _tuple(items: Iterable[str]) -> str:
    return "(" + "".join(f"{item}, " for item in items) + ")"

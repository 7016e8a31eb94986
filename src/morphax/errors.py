"""The exceptions that Morphax raises. Each message says what is wrong, why, and the line that would be right."""


class MorphaxError(Exception):
    """Base of all errors of this package."""


class MaterializationError(MorphaxError):
    """A value had to become an array and could not.

    Not a `TypeError`: JAX replaces the message of a `TypeError` that is raised while it looks at an operand.

    Attributes:
        located: Whether the message names the operation and the user's line.
    """

    located = False


class PolicyError(MorphaxError, ValueError):
    """A materialization policy that there is not."""


class MaterializationWarning(UserWarning):
    """A value became an array for want of a rule, where that was to be told."""


class RegistrationError(MorphaxError, TypeError):
    """`register` or `register_type` was given something that can have no rule."""


class DuplicateRuleError(MorphaxError, ValueError):
    """Two rules were registered for one signature."""


class AmbiguousRuleError(MorphaxError, TypeError):
    """Several rules fit the operands, and none is more specific than the others."""


class AmbiguousDefaultError(MorphaxError, TypeError):
    """Several operand types override `default`, so none of them decides."""


class RuleParameterError(MorphaxError, TypeError):
    """A primitive was bound with a parameter that its rule does not take and that is not neutral."""


class RuleResultError(MorphaxError, TypeError):
    """A rule returned something that is no result of its primitive."""


class RecursiveRuleError(MorphaxError, RecursionError):
    """A rule was entered again with the operands that it already works on."""


class FieldError(MorphaxError, ValueError):
    """A field of an `ArrayValue` holds what it must not, or was never set."""


class AvalError(MorphaxError, TypeError):
    """`aval()` did not return the type of an array."""


class StructureError(MorphaxError, TypeError):
    """Parts of a construct that have to agree (a carry, the branches) hold values that cannot be made to."""


class DifferentiationError(MorphaxError, TypeError):
    """A derivative does not fit the value that it belongs to."""


class PartsError(MorphaxError, TypeError):
    """The parts that a type names are not laid out as its array is."""

"""The built-in treatment of JAX's own primitives: imported for what these modules register."""

from . import _custom as _custom
from . import _identities as _identities
from . import _jit as _jit
from . import _remat as _remat
from . import _simpler as _simpler

"""The built-in treatment of JAX's own primitives: imported for what these modules register."""

from . import _cond as _cond
from . import _custom as _custom
from . import _custom_vmap as _custom_vmap
from . import _hijax as _hijax
from . import _identities as _identities
from . import _jit as _jit
from . import _loops as _loops
from . import _shard_map as _shard_map
from . import _simpler as _simpler
from . import _solve as _solve

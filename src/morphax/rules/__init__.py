"""The built-in treatment of JAX's own primitives: imported for what these modules register.

What has none makes its values dense and binds the primitive, which is always right. That is left so for

* `custom_partitioning`, whose rules and callbacks speak of the operands as arrays;
* `linear_call`, whose transpose is a function of arrays that cannot be traced again before it is wanted;
* `run_state`, references and Pallas kernels, which are memory of an array's own shape;
* primitives that are objects (`custom_root` since JAX 0.12, `jnp.ldexp`, and scans, checkpoints and custom derivatives under
  JAX's experimental flags), since what they expand to may have other derivatives than they have;
* callbacks into Python, which want arrays;
* values cut by `shard_map`, and results of custom derivative functions, whose array is not their one leaf.
"""

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

# isort: split
from . import _structural as _structural  # after what it is the last resort of

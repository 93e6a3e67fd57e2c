"""Names shared by every signature: axis letters and the objective protocol.

Axis letters used in jaxtyping annotations throughout the package:

======  =====================================================
``d``   vocabulary size, number of tokens
``m``   embedding width
``k``   key width
``s``   context length
``N``   number of sequences
``t``   saved times of a trajectory
``n``   total number of parameters (the flat dimension)
======  =====================================================

Everything from the flow upwards sees an *objective*: a pure function from a parameter
pytree, whose leaves are floating-point arrays, to a real scalar. Tokens are unknown
there.
"""

from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, PyTree

AnyArray: TypeAlias = Array | np.ndarray  # NumPy on the host, after a run.
Params: TypeAlias = PyTree[Float[AnyArray, "..."]]
Scalar: TypeAlias = Float[Array, ""]
RealLike: TypeAlias = float | np.ndarray | np.floating | Array


@runtime_checkable
class Objective(Protocol):
    """A scalar function of a parameter pytree; pure and differentiable."""

    def __call__(self, params: Any, /) -> Scalar: ...

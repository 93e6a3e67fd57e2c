"""Whether two critical points of equal loss are one and the same, up to symmetry.

Symmetries make every critical point a manifold of equivalent ones, and a run that is
polished from several rows finds several of its points. Along a gradient flow the loss
falls strictly, so that in the limit of close approaches two visits with the same loss
are visits to one connected set of critical points; a flow that passes at a distance,
and any optimiser, may still pass different points of equal loss. Equal loss is
therefore necessary here and not sufficient. Two points are taken as one if besides

- they coincide; or
- their invariants are equal: what the symmetries of the model leave unchanged; or
- critical points of the same loss connect them: the one found from their mid-point
  lies between them (a degenerate manifold, larger than any symmetry's); or
- no invariants are known, and the eigenvalues of the flow's Jacobian are equal. They
  are for every symmetry that preserves lengths, such as a permutation of hidden units.
  Different points that happen to have the same loss and the same spectrum cannot be
  told apart in this way.

For the attention model the losses see M = W0 W1 and Phi = W0 WQ WK^T W0^T only, and of
M only differences between logits: these are the invariants of GL(m), GL(k) and the
logit shift (see `flowsim.symmetry`).

>>> import jax, flowsim as fs
>>> from flowsim.copies import invariants_of
>>> model = fs.AttentionModel.init(jax.random.key(0), vocab=4, width=3, key_width=2)
>>> sorted(invariants_of(model))
['M', 'Phi']
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from . import _trees
from ._types import Params
from .model import AttentionModel
from .spectrum import Spectrum

Invariants = Callable[[Any], PyTree]


def invariants_of(model: AttentionModel) -> dict[str, Any]:
    """What GL(m), GL(k) and the logit shift leave unchanged.

        M = W0 W1 (1 - 1 1^T / d),     Phi = W0 WQ WK^T W0^T

    On W0, W1 and W0 WQ, W0 WK of full rank they determine the model up to these
    symmetries; at points of lower rank, together with the conserved quantities of the
    flow, up to rotations.
    """
    logits = model.W0 @ model.W1
    return {
        "M": logits - jnp.mean(logits, axis=1, keepdims=True),
        "Phi": model.attention_logits(),
    }


def are_close(here: PyTree, there: PyTree, tol: float) -> bool:
    """Whether two pytrees differ by at most `tol` times one plus the larger norm."""
    if jtu.tree_structure(here) != jtu.tree_structure(there):
        return False
    sizes = [float(_trees.norm(tree)) for tree in (here, there)]
    return float(_trees.norm(_trees.subtract(here, there))) <= tol * (1 + max(sizes))


def are_connected(
    here: Params,
    there: Params,
    middle: Params,
) -> bool:
    """Whether a critical point found from the mid-point of two others lies between."""
    length = float(_trees.norm(_trees.subtract(here, there)))
    center = _trees.scale(0.5, _trees.add_scaled(here, 1.0, there))
    return float(_trees.norm(_trees.subtract(middle, center))) <= 0.25 * length


def have_equal_spectra(here: Spectrum, there: Spectrum, tol: float) -> bool:
    """Whether two spectra of one kind agree within `tol` of the larger radius."""
    first, second = np.asarray(here.values), np.asarray(there.values)
    if first.shape != second.shape:
        return False
    radius = max(float(here.radius), float(there.radius))
    return bool(np.max(np.abs(first - second), initial=0.0) <= tol * radius)

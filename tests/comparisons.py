"""What tests of the theory compare, and how closely."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowsim.derivatives import hessian
from flowsim.loss import PopulationLoss

from .problems import CHAINS

every_chain = pytest.mark.parametrize("name", CHAINS)

DEFAULT = "default"


def close(x, y, tolerance=1e-12):
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def trees_close(x, y, tolerance=1e-12):
    jax.tree.map(lambda a, b: close(a, b, tolerance), x, y)


def largest(tree):
    return max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(tree))


def jacobian(chain, model):
    return -hessian(PopulationLoss(chain), model)

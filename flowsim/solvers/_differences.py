"""Backward differences: the coordinates in which a constant-step BDF is simplest.

Row j - 1 of a *difference array* holds the j-th backward difference of the solution
at equidistant times,

    nabla^j y_n = sum_i (-1)^i binom(j, i) y(t_n - i h),    j = 1 ... size,

and y_n itself is kept elsewhere. In these coordinates prediction, correction and a
change of the step length are small matrices acting on the rows, so one program serves
every order: the order is data, never a shape.

The formulas of order k are the family of Klopfenstein and Shampine,

    sum_{j=1}^k (1/j) nabla^j y_{n+1} - kappa_k gamma_k (y_{n+1} - p_{n+1})
        = h f(t_{n+1}, y_{n+1}),       gamma_k = sum_{j=1}^k 1/j,

where p_{n+1} is the polynomial prediction; kappa = 0 is the classical BDF of order k,
kappa = -1/((k + 1) gamma_k) that of order k + 1.

>>> import jax.numpy as jnp
>>> cube = jnp.array([[7.0], [6.0], [6.0]])  # of t^3 at t = 2, 1, 0, -1 ...
>>> float((basis(jnp.array(1.0), 3) @ cube)[0]) + 8.0 - 1.0  # ... predicts t = 3
26.0

References:
    L. F. Shampine, M. W. Reichelt, "The MATLAB ODE Suite", SIAM J. Sci. Comput. 18
    (1997), section 2.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int
from numpy.polynomial import polynomial

MAX_ORDER = 6

# Half-way from BDF k to BDF k + 1 for k <= 5, which halves the error constant. The
# classical choices of kappa keep the stability wedge wide; a symmetric Jacobian has a
# real spectrum, and on the negative real axis all of these are stable, every parasitic
# root staying below 0.90. For k = 6 BDF 7 is unstable and the half-way formula with it.
REAL_AXIS_KAPPA = (-1 / 4, -1 / 9, -3 / 44, -6 / 125, -5 / 137, 0.0)


class Formulas:
    """Coefficients of the formulas, indexed by the order 0 ... len(kappa) + 1.

    Attributes:
        gamma: sum_{j <= k} 1/j.
        leading: (1 - kappa_k) gamma_k, the factor of the unknown.
        error: kappa_k gamma_k + 1/(k + 1): this times nabla^{k+1} y_{n+1} is the local
            error to leading order.
    """

    def __init__(self, kappa: tuple[float, ...]):
        orders = np.arange(len(kappa) + 2)
        self.gamma = np.concatenate([[0.0], np.cumsum(1.0 / orders[1:])])
        factors = np.zeros(len(orders))
        factors[1:-1] = kappa
        self.leading = (1.0 - factors) * self.gamma
        self.error = factors * self.gamma + 1.0 / (orders + 1.0)


@functools.cache
def _basis_coefficients(size: int) -> np.ndarray:
    """Coefficient of s^p in basis function j: entry (j - 1, p), p = 0 ... size."""
    table = np.zeros((size, size + 1))
    function = np.array([1.0])
    for j in range(1, size + 1):
        function = polynomial.polymul(function, np.array([j - 1.0, 1.0]) / j)
        table[j - 1, : j + 1] = function
    return table


@functools.cache
def _rescaling_coefficients(size: int) -> np.ndarray:
    """Coefficient of ratio^p in entry (i, j) of the rescaling: array (i, j, p).

    Differences of the basis functions at s = 0, -ratio, -2 ratio, ...; the j-th
    difference of a polynomial of lower degree is zero, which is imposed exactly.
    """
    table = np.zeros((size, size, size + 1))
    basis_table = _basis_coefficients(size)
    powers = np.arange(size + 1)
    for i in range(1, size + 1):
        weights = [(-1) ** m * math.comb(i, m) for m in range(i + 1)]
        moments = sum(w * (-float(m)) ** powers for m, w in enumerate(weights) if m > 0)
        table[i - 1] = basis_table * moments
        table[i - 1, : i - 1] = 0.0
        table[i - 1, :, :i] = 0.0
    return table


def basis(s: Float[Array, ""], size: int) -> Float[Array, " size"]:
    """Newton's backward basis, prod_{m<j} (s + m)/(m + 1) for j = 1 ... size.

    The polynomial through the data is y_n + sum_j basis_j(s) nabla^j y_n at the time
    t_n + s h.
    """
    m = jnp.arange(size, dtype=s.dtype)
    return jnp.cumprod((s + m) / (m + 1))


def rescaling(
    ratio: Float[Array, ""], degree: Int[Array, ""], size: int
) -> Float[Array, "size size"]:
    """Matrix that turns differences at step h into differences at step ratio * h.

    Exact for the polynomial of the given degree through the data. Rows beyond the
    degree, which no formula of that order reads, are scaled by their leading
    behaviour ratio^j.
    """
    powers = ratio ** jnp.arange(size + 1, dtype=ratio.dtype)
    table = jnp.asarray(_rescaling_coefficients(size), ratio.dtype)
    full = jnp.dot(table, powers, precision=lax.Precision.HIGHEST)
    number = jnp.arange(1, size + 1, dtype=degree.dtype)
    beyond = jnp.where(number > degree, powers[1:], 0.0)
    return jnp.where(number <= degree, full, 0.0) + jnp.diag(beyond)


def correction(
    order: Int[Array, ""], size: int, dtype: DTypeLike
) -> tuple[Float[Array, "size size"], Float[Array, " size"]]:
    """(M, e) such that M D + e d are the differences at t_{n+1}.

    D are the differences at t_n, k is the order and d = nabla^{k+1} y_{n+1} =
    y_{n+1} - p_{n+1}. Downwards from j = k, nabla^j y_{n+1} = nabla^j y_n +
    nabla^{j+1} y_{n+1}; upwards, nabla^{k+2} y_{n+1} = d - nabla^{k+1} y_n. Rows beyond
    k + 2 become zero.
    """
    number = jnp.arange(1, size + 1, dtype=order.dtype)
    row, column = number[:, None], number[None, :]
    sums = (row <= column) & (column <= order)
    above = (row == order + 2) & (column == order + 1)
    return sums.astype(dtype) - above.astype(dtype), (number <= order + 2).astype(dtype)

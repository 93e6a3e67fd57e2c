"""Spectrum of the flow's Jacobian at a point: rates, directions, and their residuals.

Near a critical point the gradient flow is linear, d(theta)/dt = J theta, with
J = -Hessian symmetric: a positive eigenvalue is an escape rate, a negative one a decay
rate, and a zero is either a symmetry or a degeneracy that decides at higher order.
`spectrum` returns the eigenpairs with the residual of each, and sorts them into
unstable, centre and stable by a tolerance that is part of the result.

Small problems are diagonalised completely; large ones give both ends of the spectrum
from Hessian-vector products (see `flowsim.lanczos` for the method and why).

Left out: finding the critical point (`flowsim.critical`); eigenvalues from the middle
of a large spectrum.

>>> import jax.numpy as jnp, flowsim as fs
>>> saddle = lambda y: 0.5 * (1 - y[0] * y[1]) ** 2
>>> spec = fs.spectrum(saddle, jnp.zeros(2))
>>> spec.values.tolist(), int(spec.num_unstable)
([-1.0, 1.0], 1)
"""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from . import _summary, _trees
from ._types import Objective, Params, Scalar
from .lanczos import Ends, block_lanczos, check_double
from .model import AttentionModel
from .symmetry import (
    Symmetries,
    explained_shares,
    num_explained,
    symmetry_basis,
    symmetry_directions,
)

DENSE_UP_TO = 2000  # parameters; the dense path holds a few n x n matrices
DEFAULT_NUM = 10


class Spectrum(eqx.Module):
    """Eigenpairs of J = -Hessian, ascending, split by the sign of the eigenvalue.

    Counts are of the pairs found: with `complete` false they cover only the ends that
    were asked for (see `all_unstable_found`).

    Attributes:
        values: eigenvalues (rates, 1 / flow time), ascending.
        vectors: unit eigenvectors in the model's own structure, leading axis = pair.
        residuals: |J v - lambda v|, from Hessian-vector products made afresh.
        converged: whether the residual met `tol` times `radius`.
        radius: largest |eigenvalue| (matrix-free: as far as seen, a lower bound).
        tolerance: eigenvalues of size at most this count as zero.
        num_symmetry: how many of the zeros the symmetries explain; None when none are
            known. With `complete` false, how many of the zeros found: one that mixes
            symmetries with other null directions does not count.
        num_products: Hessian-vector products used.
        complete: whether all n pairs are there.
        method: "dense" or "matrix-free".
        which: the ends asked for.
    """

    values: Float[Array, "*batch k"]
    vectors: Params
    residuals: Float[Array, "*batch k"]
    converged: Bool[Array, "*batch k"]
    radius: Float[Array, "*batch"]
    tolerance: Float[Array, "*batch"]
    num_symmetry: Int[Array, "*batch"] | None
    num_products: Int[Array, "*batch"]
    complete: bool = eqx.field(static=True)
    method: str = eqx.field(static=True)
    which: Ends = eqx.field(static=True)

    @property
    def is_unstable(self) -> Bool[Array, "*batch k"]:
        return self.values > self.tolerance[..., None]

    @property
    def is_center(self) -> Bool[Array, "*batch k"]:
        return jnp.abs(self.values) <= self.tolerance[..., None]

    @property
    def is_stable(self) -> Bool[Array, "*batch k"]:
        return self.values < -self.tolerance[..., None]

    @property
    def num_unstable(self) -> Int[Array, "*batch"]:
        """The index of a critical point, if `all_unstable_found`."""
        return jnp.sum(self.is_unstable, axis=-1, dtype=jnp.int32)

    @property
    def num_center(self) -> Int[Array, "*batch"]:
        return jnp.sum(self.is_center, axis=-1, dtype=jnp.int32)

    @property
    def num_stable(self) -> Int[Array, "*batch"]:
        return jnp.sum(self.is_stable, axis=-1, dtype=jnp.int32)

    @property
    def num_degenerate(self) -> Int[Array, "*batch"] | None:
        """Zeros, of those found, that no known symmetry explains."""
        if self.num_symmetry is None:
            return None
        return self.num_center - self.num_symmetry

    @property
    def all_unstable_found(self) -> Bool[Array, "*batch"]:
        """Whether no unstable pair can be missing: something below them was found."""
        trusted = jnp.all(self.converged | ~self.is_unstable, axis=-1)
        if self.complete:
            return trusted
        if self.which == "smallest":
            return jnp.zeros_like(trusted)
        # The upper half of the list is the upper end.
        upper = self.values.shape[-1] // 2 if self.which == "both" else 0
        return trusted & ~self.is_unstable[..., upper]

    @property
    def unstable(self) -> Params:
        """The unstable directions, stacked (concrete spectra only)."""
        return self._directions(self.is_unstable)

    @property
    def center(self) -> Params:
        """The directions of the centre, stacked (concrete spectra only)."""
        return self._directions(self.is_center)

    @property
    def stable(self) -> Params:
        """The stable directions, stacked (concrete spectra only)."""
        return self._directions(self.is_stable)

    def _directions(self, selected: Bool[Array, " k"]) -> Params:
        if _trees.is_traced(selected) or selected.ndim != 1:
            raise ValueError(
                "how many directions a subset holds depends on the values: use the "
                "masks is_unstable, is_center, is_stable under jit or for a batch."
            )
        rows = np.flatnonzero(np.asarray(selected))
        return jtu.tree_map(lambda leaf: leaf[rows], self.vectors)

    def __str__(self) -> str:
        rows = {
            "values": self.values,
            "unstable": self.num_unstable,
            "centre": self.num_center,
            "  by symmetry": "unknown"
            if self.num_symmetry is None
            else self.num_symmetry,
            "stable": self.num_stable,
            "zero below": self.tolerance,
            "residual": jnp.max(self.residuals, axis=-1),
            "converged": jnp.all(self.converged, axis=-1),
            "method": self.method + (", complete" if self.complete else ", ends only"),
            "products": self.num_products,
        }
        return _summary.aligned("Spectrum of J = -Hessian", rows)


def spectrum(
    objective: Objective,
    params: Params,
    *,
    num: int | None = None,
    which: Ends = "both",
    method: Literal["auto", "dense", "matrix-free"] = "auto",
    tol: float = 1e-10,
    center_tol: float = 1e-7,
    symmetries: Literal["auto"] | Symmetries | None = "auto",
    symmetry_tol: float = 1e-6,
    max_restarts: int = 200,
    basis_size: int | None = None,
    key: PRNGKeyArray | None = None,
) -> Spectrum:
    """Eigenpairs of the flow's Jacobian J = -Hessian at `params`.

    Args:
        objective: the loss whose gradient flow is meant.
        params: the point, in double precision.
        num: pairs wanted at each end. Absent, all of them when dense and 10 at each end
            when matrix-free.
        which: "both" ends, or the "largest" (most unstable), or the "smallest".
        method: "auto" is "dense" up to 2,000 parameters and "matrix-free" above.
        tol: a pair has converged when its residual is at most `tol` times the radius.
        center_tol: eigenvalues of size at most `center_tol` times the radius are zero.
            The default allows for a degenerate point known only to |grad| = 1e-12.
        symmetries: a function from parameters to directions stacked along a leading
            axis, used to explain zeros; "auto" knows those of `AttentionModel`.
        symmetry_tol: see `flowsim.symmetry.symmetry_basis`.
        max_restarts, basis_size, key: see `flowsim.lanczos.eigenpairs`.

    Raises:
        ValueError: on single precision, or an impossible option.

    References:
        Strogatz (1994), "Nonlinear Dynamics and Chaos", section 6.3, for the split.
    """
    check_double(params, "params")
    size = _trees.num_params(params)
    if method not in ("auto", "dense", "matrix-free"):
        raise ValueError(
            f'method must be "auto", "dense" or "matrix-free"; got {method!r}.'
        )
    if method == "auto":
        method = "dense" if size <= DENSE_UP_TO else "matrix-free"
    if symmetries == "auto":
        symmetries = symmetry_directions if isinstance(params, AttentionModel) else None
    if num is None:
        # Enough pairs at either end that together they are all.
        num = size if method == "dense" else DEFAULT_NUM
    return _spectrum(
        objective,
        params,
        jax.random.key(0) if key is None else key,
        jnp.asarray((tol, center_tol, symmetry_tol), float),
        jnp.asarray(max_restarts, jnp.int32),
        symmetries,
        (num, which, method == "dense", basis_size),
    )


@eqx.filter_jit
def _spectrum(
    objective: Objective,
    params: Params,
    key: PRNGKeyArray,
    tolerances: Float[Array, "3"],
    max_restarts: Int[Array, ""],
    symmetries: Symmetries | None,
    options: tuple[int, Ends, bool, int | None],
) -> Spectrum:
    tol, center_tol, symmetry_tol = tolerances
    num, which, dense, basis_size = options
    flat, unravel = _trees.ravel(params)
    gradient = jax.grad(lambda v: objective(unravel(v)))

    def product(rows: Float[Array, "b n"]) -> Float[Array, "b n"]:
        return -jax.lax.map(
            lambda row: jax.jvp(gradient, (flat,), (row,))[1],
            rows,
            batch_size=min(rows.shape[0], _batch_size(flat.size)),
        )

    found = block_lanczos(
        product,
        flat.size,
        num=num,
        which=which,
        tol=tol,
        max_restarts=max_restarts,
        basis_size=flat.size if dense else basis_size,
        key=key,
        dtype=flat.dtype,
    )
    complete = found.values.shape[0] == flat.size
    tolerance = center_tol * found.radius
    num_symmetry = None
    center = jnp.abs(found.values) <= tolerance
    if symmetries is not None and complete:
        basis, _ = symmetry_basis(params, symmetries, symmetry_tol)
        num_symmetry = num_explained(found.vectors, center.astype(flat.dtype), basis)
    elif symmetries is not None:
        shares = explained_shares(params, symmetries, found.vectors)
        num_symmetry = jnp.sum(center & (shares > 0.99**2), dtype=jnp.int32)
    return Spectrum(
        values=found.values,
        vectors=jax.vmap(unravel)(found.vectors),
        residuals=found.residuals,
        converged=found.converged,
        radius=found.radius,
        tolerance=tolerance,
        num_symmetry=num_symmetry,
        num_products=found.num_products,
        complete=complete,
        method="dense" if dense else "matrix-free",
        which=which,
    )


def _batch_size(size: int) -> int:
    """Products made at once: on a CPU as many as its caches hold."""
    numbers = 2**15 if jax.default_backend() == "cpu" else 2**22
    return max(1, numbers // size)


def block_weights(direction: Params) -> dict[str, Scalar]:
    """Fraction of a direction's squared norm in each leaf; fractions sum to one.

    Keys are the leaves' paths: "W0", "W1", "WQ", "WK" for the attention model. For a
    stack of directions use `jax.vmap(block_weights)(spec.vectors)`. A zero direction
    gives NaN.
    """
    squares = {
        jtu.keystr(path, simple=True, separator=".") or "params": jnp.sum(leaf**2)
        for path, leaf in jtu.tree_leaves_with_path(direction)
    }
    total = sum(squares.values())
    return {name: square / total for name, square in squares.items()}

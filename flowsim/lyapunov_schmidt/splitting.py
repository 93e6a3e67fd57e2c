"""Split the space at a degenerate critical point: kernel, symmetry, range."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from .. import _summary, _trees
from .._types import Params, RealLike, Scalar
from ..derivatives import hessian
from ..lanczos import check_double
from ..model import AttentionModel
from ..symmetry import Symmetries, symmetry_basis, symmetry_directions

Family = Callable[[Any, Any], Scalar]  # objective(params, delta)


class At(eqx.Module):
    """One member of a family of objectives, as an objective."""

    family: Family
    delta: Scalar

    def __call__(self, params: Params) -> Scalar:
        return self.family(params, self.delta)


class Splitting(eqx.Module):
    """R^n at a degenerate critical point, as an orthogonal sum of four subspaces.

    All rows are orthonormal vectors in the coordinates of `_trees.ravel`.

    Attributes:
        point: the critical point, at `delta`.
        delta: the parameter of the family there.
        kernel: directions of the kernel that carry the bifurcation.
        symmetry: directions of the kernel along the orbit of the point; held fixed.
        held: the other directions of the kernel, if only some were asked for; held.
        range_: eigenvectors of the non-zero eigenvalues.
        range_values: these eigenvalues, of the Hessian.
        tolerance: eigenvalues of size at most this count as zero.
        defect: largest |H v| over symmetry and kernel directions; it should be below
            the tolerance.
    """

    point: Params
    delta: Scalar
    kernel: Float[Array, "r n"]
    symmetry: Float[Array, "g n"]
    held: Float[Array, "h n"]
    range_: Float[Array, "p n"]
    range_values: Float[Array, " p"]
    tolerance: Scalar
    defect: Scalar

    @property
    def nullity(self) -> int:
        """Dimension of the whole kernel of the Hessian."""
        return sum(rows.shape[0] for rows in (self.kernel, self.symmetry, self.held))

    def place(self, u: Float[Array, " r"], w: Float[Array, " p"]) -> Params:
        """The parameters point + u . kernel + w . range."""
        flat, unravel = _trees.ravel(self.point)
        return unravel(flat + u @ self.kernel + w @ self.range_)

    def coordinates(
        self, params: Params
    ) -> tuple[Float[Array, " r"], Float[Array, " p"]]:
        """Kernel and range coordinates (u, w) of a point."""
        shift = _trees.ravel(params)[0] - _trees.ravel(self.point)[0]
        return self.kernel @ shift, self.range_ @ shift

    def __str__(self) -> str:
        rows = {
            "parameters": self.kernel.shape[1],
            "kernel": self.nullity,
            "  by symmetry": self.symmetry.shape[0],
            "  coordinates": self.kernel.shape[0],
            "  held": self.held.shape[0],
            "range": self.range_.shape[0],
            "smallest in range": jnp.min(jnp.abs(self.range_values), initial=jnp.inf),
            "zero below": self.tolerance,
            "|H v| on the kernel": self.defect,
        }
        return _summary.aligned("Splitting", rows)


def split(
    family: Family,
    point: Params,
    delta: RealLike = 0.0,
    *,
    kernel: Float[ArrayLike, "r n"] | None = None,
    symmetries: Symmetries | None = None,
    center_tol: float = 1e-7,
) -> Splitting:
    """Split the space at a critical point of family(., delta) into kernel and range.

    The kernel is that of the Hessian; the directions in which symmetries carry the
    point are taken out of it, because along them the reduced function is constant.
    Runs outside `jit`: the dimensions depend on the numbers.

    Args:
        family: objective(params, delta).
        point: the critical point, in double precision.
        delta: the parameter there.
        kernel: directions of the kernel to use as coordinates (orthonormalised here),
            where not all of it is wanted or a basis is known.
        symmetries: function from parameters to directions stacked along a leading axis;
            by default those of `AttentionModel`, and none for anything else.
        center_tol: eigenvalues of size at most `center_tol` times the largest are zero.

    Raises:
        ValueError: on single precision, or if `kernel` does not lie in the kernel.

    References:
        Golubitsky and Schaeffer (1985), "Singularities and Groups in Bifurcation
        Theory" I, section VII.
    """
    check_double(point, "point")
    delta = jnp.asarray(delta, float)
    matrix = np.asarray(hessian(At(family, delta), point))
    values, vectors = np.linalg.eigh(matrix)
    tolerance = center_tol * np.max(np.abs(values), initial=0.0)
    null = np.abs(values) <= tolerance
    whole = vectors[:, null].T
    if symmetries is None and isinstance(point, AttentionModel):
        symmetries = symmetry_directions
    orbit = np.zeros((0, matrix.shape[0]))
    if symmetries is not None:
        basis, rank = symmetry_basis(point, symmetries)
        orbit = np.asarray(basis)[: int(rank)]
    proper = _complement(whole, orbit)
    held = np.zeros((0, matrix.shape[0]))
    if kernel is not None:
        asked = np.atleast_2d(np.asarray(kernel, float))
        if asked.shape[-1] != matrix.shape[0]:
            raise ValueError(
                f"kernel must have rows of length {matrix.shape[0]}; "
                f"got shape {asked.shape}."
            )
        asked = np.linalg.qr(asked.T)[0].T * _signs(asked)
        outside = np.max(np.linalg.norm(asked @ matrix, axis=1))
        if outside > max(10 * tolerance, 1e-12):
            raise ValueError(
                "kernel must consist of null directions of the Hessian; "
                f"one has |H v| = {outside:.3g}, zero is below {tolerance:.3g}."
            )
        held, proper = _complement(proper, asked), asked
    rest = np.concatenate([orbit, held, proper])
    defect = np.max(np.linalg.norm(rest @ matrix, axis=1), initial=0.0)
    return Splitting(
        point=point,
        delta=delta,
        kernel=jnp.asarray(proper),
        symmetry=jnp.asarray(orbit),
        held=jnp.asarray(held),
        range_=jnp.asarray(vectors[:, ~null].T),
        range_values=jnp.asarray(values[~null]),
        tolerance=jnp.asarray(tolerance),
        defect=jnp.asarray(defect),
    )


def _signs(rows: np.ndarray) -> np.ndarray:
    """Signs that undo those of a QR factorisation, as a column."""
    triangle = np.linalg.qr(rows.T)[1]
    return np.where(np.diag(triangle) < 0, -1.0, 1.0)[:, None]


def _complement(space: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Orthonormal rows of the part of `space` orthogonal to `part` (rows of both)."""
    if len(part) == 0 or len(space) == 0:
        return space
    # Cosines of the principal angles: one where a direction lies in `part`.
    rotation, cosines, _ = np.linalg.svd(space @ part.T, full_matrices=True)
    count = int(np.sum(cosines > 0.5))
    return rotation[:, count:].T @ space

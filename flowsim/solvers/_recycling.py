"""Ritz vectors that outlive a step: a preconditioner recycled along the solution.

The stiff directions of a flow turn slowly beside the steps that resolve it. So an
approximate invariant subspace of the Jacobian J serves several Newton systems
(I - c h J) x = b, one after the other, as the preconditioner

    P^-1 = I + U^T (1/(1 - c h theta) - 1) U,       J U^T ~ U^T theta,   U U^T = I,

for every c and h. Conjugate gradients then see the spectrum without its k largest
members. A stale subspace costs iterations, not accuracy: P stays symmetric positive
definite whatever U is.

When to renew it is an economic question. Products beyond a fair number per step are
added up; when they would have paid for a renewal, the subspace is renewed (the
ski-rental argument). On problems that stay easy it never happens. Below a thousand
numbers it is operations that cost, not their size: there the products of a renewal are
made all at once, at the price of a few. A renewal is one sweep of subspace iteration
with Rayleigh-Ritz, all of it with the present Jacobian. It converges to the eigenvalues
largest in size, for a gradient flow the stiff ones.

Tried and left out: harvesting the directions of conjugate gradients over several
solves. It needs no products of its own and works while J stands still, but directions
of different solves are nearly parallel and their images belong to different Jacobians;
Rayleigh-Ritz amplifies that difference into large spurious Ritz values.

References:
    Y. Saad, M. Yeung, J. Erhel, F. Guyomarc'h, "A deflated version of the conjugate
    gradient algorithm", SIAM J. Sci. Comput. 21 (2000). Y. Saad, "Numerical Methods
    for Large Eigenvalue Problems" (2011), chapter 5: subspace iteration.
"""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

# Sweeps of subspace iteration from a start that knows nothing; a renewal needs one.
_FIRST_SWEEPS = 3
# Below this number of parameters a batch of products costs little more than one.
SMALL = 1000
# Products that a well preconditioned solve still needs, and excess products that a
# renewal of a small system is worth (a large one is worth as many as it takes).
_FAIR_PRODUCTS, _FAIR_PRODUCTS_SMALL, _PRICE_SMALL = 10, 1, 16


class Recycled(eqx.Module):
    """Approximate eigenpairs of the Jacobian, the largest in size.

    Attributes:
        vectors: orthonormal rows (from the first renewal on). Large ones are in single
            precision: a preconditioner needs no more, and they fill the memory.
        values: Ritz values, all zero before the first renewal.
        excess: products spent beyond the fair number since the last renewal.
    """

    vectors: Float[Array, "k n"]
    values: Float[Array, " k"]
    excess: Int[Array, ""]

    @classmethod
    def empty(cls, rank: int, size: int, dtype: DTypeLike) -> "Recycled":
        """Vectors that do not precondition anything yet."""
        stored = dtype if size < SMALL else jnp.float32
        vectors = jax.random.normal(jax.random.key(0), (rank, size), stored)
        return cls(vectors, jnp.zeros(rank, dtype), jnp.zeros((), jnp.int32))

    @property
    def is_small(self) -> bool:
        """Whether operations cost more than their size."""
        return self.vectors.shape[1] < SMALL

    def preconditioner(
        self, scale: Float[Array, ""]
    ) -> Callable[[Float[Array, " n"]], Float[Array, " n"]]:
        """The map P^-1 for the matrix I - scale J.

        Growing modes (theta > 0), of which there are few, are left alone.
        """
        decay = jnp.minimum(scale * self.values, 0.0)
        # Rows orthonormal up to round-off must not make the map indefinite.
        limit = 1 - 100 * float(jnp.finfo(self.vectors.dtype).eps)
        weight = jnp.maximum(decay / (1 - decay), -limit).astype(self.vectors.dtype)
        exact = lax.Precision.HIGHEST

        def apply(r):
            part = jnp.dot(self.vectors, r.astype(self.vectors.dtype), precision=exact)
            update = jnp.dot(weight * part, self.vectors, precision=exact)
            return r + update.astype(r.dtype)

        if self.is_small:
            return apply
        active = jnp.any(weight < 0)
        return lambda r: lax.cond(active, apply, lambda r: r, r)

    def charge(self, num_products: Int[Array, ""]) -> "Recycled":
        """The same after a solve that took so many products."""
        fair = _FAIR_PRODUCTS_SMALL if self.is_small else _FAIR_PRODUCTS
        excess = jnp.maximum(num_products - fair, 0)
        return eqx.tree_at(lambda s: s.excess, self, self.excess + excess)

    def renew_if_due(
        self, product: Callable[[Float[Array, " n"]], Float[Array, " n"]]
    ) -> tuple["Recycled", Int[Array, ""]]:
        """Renew the subspace if that pays, and the number of products it took.

        Args:
            product: the map v -> J v.
        """
        due = self.excess >= (_PRICE_SMALL if self.is_small else self.values.size)
        sweeps = jnp.where(jnp.all(self.values == 0), _FIRST_SWEEPS, 1)
        renewed = lax.cond(
            due,
            lambda s: lax.fori_loop(0, sweeps, lambda _, s: s._swept(product), s),
            lambda s: s,
            self,
        )
        num_products = jnp.where(due, sweeps * self.values.size, 0)
        return renewed, num_products.astype(jnp.int32)

    def _swept(
        self, product: Callable[[Float[Array, " n"]], Float[Array, " n"]]
    ) -> "Recycled":
        """The subspace after one sweep of subspace iteration with v -> J v."""
        dtype, stored = self.values.dtype, self.vectors.dtype
        exact = lax.Precision.HIGHEST
        # XLA's batched products of large systems are slower than single ones.
        over_rows = jax.vmap if self.is_small else lambda f: partial(lax.map, f)
        images = over_rows(lambda v: product(v.astype(dtype)))(self.vectors)
        # A preconditioner has no derivative: it does not change the solution.
        images = lax.stop_gradient(images)
        ritz = jnp.dot(images, self.vectors.astype(dtype).T, precision=exact)
        values, mixing = jnp.linalg.eigh(0.5 * (ritz + ritz.T))
        order = jnp.argsort(-jnp.abs(values))
        images = jnp.dot(mixing[:, order].T, images, precision=exact)
        # In this order the dominant directions are not disturbed by the others.
        vectors = jnp.linalg.qr(images.T)[0].T.astype(stored)
        return Recycled(vectors, values[order], jnp.zeros((), jnp.int32))

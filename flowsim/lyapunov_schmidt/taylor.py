"""Taylor polynomials of vector fields: coefficients to read, polynomials to solve."""

import math
from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from .. import _summary
from .._types import RealLike, Scalar


class TaylorField(eqx.Module):
    """A vector field f(u, delta) on R^r as a polynomial around (0, `delta`).

    Attributes:
        tensors: k-th derivatives in (u, delta), shape (r, r+1, ..., r+1), without
            factorials, k = 0 ... order; symmetric in all but the first axis.
        delta: centre of the expansion in delta.
        residual: of the range equation at the centre.
    """

    tensors: tuple[Float[Array, "..."], ...]
    delta: Scalar
    residual: Scalar

    @property
    def order(self) -> int:
        return len(self.tensors) - 1

    @property
    def dimension(self) -> int:
        """Number r of kernel coordinates."""
        return self.tensors[0].shape[0]

    def coefficient(self, component: int, powers: Sequence[int]) -> float:
        """Coefficient in f_component of the monomial with these powers.

        Args:
            component: 0 ... r - 1.
            powers: exponents of u_1 ... u_r and of (delta - centre).

        Raises:
            ValueError: for the wrong number of powers, or a degree beyond the order.
        """
        if len(powers) != self.dimension + 1 or sum(powers) > self.order:
            raise ValueError(
                f"powers must be {self.dimension + 1} exponents that sum to at most "
                f"{self.order}; got {tuple(powers)}."
            )
        index = [axis for axis, power in enumerate(powers) for _ in range(power)]
        entry = self.tensors[sum(powers)][(component, *index)]
        return float(entry) / math.prod(map(math.factorial, powers))

    def __call__(
        self, u: Float[ArrayLike, " r"], delta: RealLike
    ) -> Float[Array, " r"]:
        """Value of the polynomial."""
        step = jnp.asarray(delta, float) - self.delta
        z = jnp.concatenate([jnp.asarray(u, float), step[None]])
        total = jnp.zeros(self.dimension)
        for k, tensor in enumerate(self.tensors):
            for _ in range(k):
                tensor = tensor @ z
            total = total + tensor / math.factorial(k)
        return total

    def at(self, delta: RealLike) -> "Polynomial":
        """The polynomial in u alone, at one delta."""
        r, step = self.dimension, float(delta) - float(self.delta)
        terms = []
        for k in range(self.order + 1):
            # Of a tensor of degree j, j - k slots take the parameter.
            term = np.zeros((r,) + (r,) * k)
            for j in range(k, self.order + 1):
                block = np.asarray(self.tensors[j])
                block = block[(slice(None), *[slice(r)] * k, *[r] * (j - k))]
                weight = step ** (j - k) / (math.factorial(k) * math.factorial(j - k))
                term = term + weight * block
            terms.append(term)
        return Polynomial(tuple(terms))

    def __str__(self) -> str:
        rows = {
            "kernel coordinates": self.dimension,
            "order": self.order,
            "constant": self.tensors[0],
            "linear in u": self.tensors[1][:, :-1],
            "linear in delta": self.tensors[1][:, -1],
            "range residual": self.residual,
        }
        return _summary.aligned("TaylorField", rows)


class Polynomial(eqx.Module):
    """A polynomial vector field f(u) = sum_k T_k[u, ..., u] on R^r.

    Attributes:
        terms: T_k, shape (r, r, ..., r) with k + 1 axes, symmetric in all but the
            first; factorials included.
    """

    terms: tuple[Float[np.ndarray, "..."], ...]

    @property
    def dimension(self) -> int:
        return self.terms[0].shape[0]

    @property
    def degree(self) -> int:
        return len(self.terms) - 1

    def __call__(self, u: Float[np.ndarray, "... r"]) -> Float[np.ndarray, "... r"]:
        return self.shifted(np.asarray(u))[0]

    def shifted(self, centre: Float[np.ndarray, "... r"]) -> list[np.ndarray]:
        """Terms of the same polynomial around other centres (leading axes: centres).

        T'_k = sum_{j >= k} C(j, k) T_j[centre, ..., centre]     (j - k times)
        """
        centre = np.asarray(centre)
        batch = centre.shape[:-1]
        terms = []
        for k in range(self.degree + 1):
            total = np.zeros(batch + self.terms[k].shape)
            for j in range(k, self.degree + 1):
                block = np.broadcast_to(self.terms[j], batch + self.terms[j].shape)
                for _ in range(j - k):
                    ones = (1,) * (block.ndim - len(batch) - 1)
                    x = centre.reshape(batch + ones + centre.shape[-1:])
                    block = np.sum(block * x, axis=-1)
                total = total + math.comb(j, k) * block
            terms.append(total)
        return terms

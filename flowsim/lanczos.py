"""Extreme eigenpairs of a symmetric operator known only by its products.

Spectra of flows are full of multiplicities: a symmetry copies an eigenvalue m times,
thousands of directions share the value zero. In exact arithmetic a single-vector
Lanczos method sees one copy of each; without reorthogonalisation it also invents copies
that do not exist. `eigenpairs` is a thick-restart *block* Lanczos method for that
situation, which runs under `jit` and `vmap` and marks what has not converged. On a CPU,
SciPy's `eigsh` needs less time for the same pairs (`benchmarks/spectrum.py`):

- the block has at least as many vectors as pairs are wanted at one end, so that a
  generic start has a component on every copy of every wanted eigenvalue;
- every new block is orthogonalised twice against the whole basis, so no ghosts appear;
- directions in which the Krylov space stops growing are replaced by random ones from
  its orthogonal complement, so an invariant subspace is left and not reported as all;
- restarts keep many more Ritz vectors than pairs wanted (three quarters of them
  unwanted), which is what resolves clusters: with 32 eigenvalues within 1e-6 of each
  other, keeping 80 vectors took 600 products where keeping 30 failed after 30,000;
- residuals come from products made afresh after the iteration, and a pair that misses
  the tolerance is marked.

Why not a library: SciPy's ARPACK runs on the host, under neither `jit` nor `vmap`, and
multiplies one vector at a time; `jax.experimental.sparse.linalg.lobpcg_standard` finds
one end only and has no restarts that keep converged clusters apart; matfree offers the
tridiagonalisation without restarts, one vector at a time, hence one copy of each
eigenvalue. `benchmarks/spectrum.py` compares with SciPy on the same products.

Left out: interior eigenvalues, preconditioning, non-symmetric operators.

>>> import jax.numpy as jnp
>>> from flowsim.lanczos import eigenpairs
>>> swap = lambda x: x[::-1]
>>> eigenpairs(swap, jnp.zeros(2), num=1).values.tolist()
[-1.0, 1.0]
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from . import _summary, _trees
from ._types import Params, Scalar

Ends = Literal["both", "largest", "smallest"]
BlockProduct = Callable[[Float[Array, "b n"]], Float[Array, "b n"]]


class EigenPairs(eqx.Module):
    """Eigenvalues in ascending order, with unit eigenvectors and their residuals.

    Attributes:
        values: Rayleigh quotients of the vectors, ascending.
        vectors: eigenvectors in the operand's own structure, leading axis = pair.
        residuals: |A v - lambda v|, from products made after the iteration ended.
        converged: residual at most `tol` * `radius`.
        radius: the spectral radius, as far as the iteration has seen it (both ends
            are always part of the basis): a lower bound, sharp to a few digits.
        num_products: products with the operator.
        num_restarts: restarts of the iteration; 0 when the operator was small enough
            to be diagonalised completely.
    """

    values: Float[Array, " k"]
    vectors: Params
    residuals: Float[Array, " k"]
    converged: Bool[Array, " k"]
    radius: Scalar
    num_products: Int[Array, ""]
    num_restarts: Int[Array, ""]

    def __str__(self) -> str:
        shown = {name: x for name, x in vars(self).items() if name != "vectors"}
        return _summary.aligned("EigenPairs", shown)


def eigenpairs(
    matvec: Callable[[Params], Params],
    like: Params,
    *,
    num: int,
    which: Ends = "both",
    tol: float = 1e-10,
    max_restarts: int = 200,
    basis_size: int | None = None,
    key: PRNGKeyArray | None = None,
) -> EigenPairs:
    """Extreme eigenpairs of a symmetric linear map, multiplicities included.

    An operator too small for the iteration (n at most a little above `basis_size`) is
    applied to the identity and diagonalised.

    Args:
        matvec: a symmetric linear map from pytrees like `like` to the same structure.
        like: any pytree of the operand's structure; its values are not used.
        num: pairs wanted at each end, counted with multiplicity. When the ends would
            overlap, every pair is returned once.
        which: "largest" and "smallest" mean the algebraic ends.
        tol: a pair has converged when its residual is at most `tol` times the radius.
        max_restarts: bound on the number of restarts.
        basis_size: vectors kept in memory, beside one block; chosen from `num` when
            absent. Larger separates closer clusters and takes more memory.
        key: for the random start; a fixed key when absent.

    Raises:
        ValueError: on single precision, or impossible `num`, `which`, `basis_size`.

    References:
        Golub and Underwood (1977), "The block Lanczos method for computing
        eigenvalues". Wu and Simon (2000), "Thick-restart Lanczos method for large
        symmetric eigenvalue problems", SIAM J. Matrix Anal. Appl. 22.
    """
    check_double(like, "like")
    return _eigenpairs(
        matvec,
        like,
        jax.random.key(0) if key is None else key,
        jnp.asarray(tol, float),
        jnp.asarray(max_restarts, jnp.int32),
        (num, which, basis_size),
    )


@eqx.filter_jit
def _eigenpairs(
    matvec: Callable[[Params], Params],
    like: Params,
    key: PRNGKeyArray,
    tol: Scalar,
    max_restarts: Int[Array, ""],
    options: tuple[int, Ends, int | None],
) -> EigenPairs:
    flat, unravel = _trees.ravel(like)

    def product(rows: Float[Array, "b n"]) -> Float[Array, "b n"]:
        return jax.vmap(lambda row: _trees.ravel(matvec(unravel(row)))[0])(rows)

    num, which, basis_size = options
    found = block_lanczos(
        product,
        flat.size,
        num=num,
        which=which,
        tol=tol,
        max_restarts=max_restarts,
        basis_size=basis_size,
        key=key,
        dtype=flat.dtype,
    )
    return eqx.tree_at(lambda f: f.vectors, found, jax.vmap(unravel)(found.vectors))


def check_double(params: Any, name: str) -> None:
    """Check that `params` is a pytree of double-precision arrays.

    Raises:
        ValueError: naming the argument and the first dtype that is not.
    """
    _trees.check_params(params, name)
    for leaf in jax.tree_util.tree_leaves(params):
        if jnp.finfo(leaf.dtype).bits < 64:
            raise ValueError(
                f"{name} must be in double precision, where small eigenvalues and "
                f"gradients can be told from round-off; got {leaf.dtype}. Turn on "
                'jax.config.update("jax_enable_x64", True).'
            )


class _Plan(NamedTuple):
    """The static sizes of an iteration; n, and the pairs wanted at either end."""

    low: int  # pairs wanted at the lower end
    high: int  # pairs wanted at the upper end
    block: int
    keep_low: int  # Ritz vectors that survive a restart, a multiple of block in all
    keep_high: int
    basis: int  # multiple of block

    @property
    def keep(self) -> int:
        return self.keep_low + self.keep_high


def _plan(n: int, num: int, which: Ends, basis_size: int | None) -> _Plan | None:
    """Sizes for the iteration; None when the operator is small: take it whole."""
    if which not in ("both", "largest", "smallest"):
        raise ValueError(
            f'which must be "both", "largest" or "smallest"; got {which!r}.'
        )
    if not isinstance(num, int) or num < 1:
        raise ValueError(f"num must be a positive integer; got {num!r}.")
    low = 0 if which == "largest" else num
    high = 0 if which == "smallest" else num
    block = max(num, 4)

    def blocks(size: int) -> int:
        return -(-size // block)

    keep = block * blocks(max(low + high + 60, 3 * (low + high)))
    basis = keep + 12 * block
    if basis_size is not None:
        basis = block * blocks(basis_size)
        keep = min(keep, block * (basis // (2 * block)))
    if basis + block >= n:
        return None
    if keep < low + high:
        raise ValueError(
            f"basis_size must be at least {2 * block * blocks(low + high)} to find "
            f"{low + high} pairs; got {basis_size}."
        )
    # What is kept beyond the wanted pairs is split evenly: a stiff far end, once
    # resolved, no longer slows down the near one.
    keep_low = low + (keep - low - high) // 2
    return _Plan(low, high, block, keep_low, keep - keep_low, basis)


def block_lanczos(
    product: BlockProduct,
    n: int,
    *,
    num: int,
    which: Ends,
    tol: float | Scalar,
    max_restarts: int | Int[Array, ""],
    basis_size: int | None,
    key: PRNGKeyArray,
    dtype: Any,
) -> EigenPairs:
    """`eigenpairs` on flat vectors: `product` maps rows to rows; vectors are (k, n)."""
    plan = _plan(n, num, which, basis_size)
    if plan is None:
        vectors, radius, products = _diagonalise(product, n, num, which, dtype)
        restarts = jnp.zeros((), jnp.int32)
    else:
        vectors, radius, restarts = _iterate(
            product, n, plan, tol, max_restarts, key, dtype
        )
        products = plan.basis + restarts * (plan.basis - plan.keep)
    images = product(vectors)
    values = jnp.sum(vectors * images, axis=1)
    order = jnp.argsort(values)
    values, vectors, images = values[order], vectors[order], images[order]
    residuals = jnp.linalg.norm(images - values[:, None] * vectors, axis=1)
    return EigenPairs(
        values=values,
        vectors=vectors,
        residuals=residuals,
        converged=residuals <= tol * radius,
        radius=radius,
        num_products=jnp.asarray(products + vectors.shape[0], jnp.int32),
        num_restarts=restarts,
    )


def _diagonalise(
    product: BlockProduct, n: int, num: int, which: Ends, dtype: Any
) -> tuple[Float[Array, "k n"], Scalar, int]:
    dense = product(jnp.eye(n, dtype=dtype))
    values, vectors = jnp.linalg.eigh(0.5 * (dense + dense.T))
    if which == "both" and 2 * num < n:
        wanted = jnp.r_[0:num, n - num : n]
    elif which == "both" or num >= n:
        wanted = jnp.arange(n)
    else:
        wanted = jnp.arange(num) + (n - num if which == "largest" else 0)
    return vectors.T[wanted], jnp.max(jnp.abs(values)), n


class _State(NamedTuple):
    basis: Float[Array, "rows n"]  # orthonormal rows; zero where not yet filled
    projection: Float[Array, "p p"]  # V A V^T
    coupling: Float[Array, "b b"]  # last block's image along the next block
    radius: Scalar  # largest |A v| or Ritz value seen, at most |A|
    key: PRNGKeyArray
    start: Int[Array, ""]  # block from which this cycle expands
    restarts: Int[Array, ""]
    done: Bool[Array, ""]


def _iterate(
    product: BlockProduct,
    n: int,
    plan: _Plan,
    tol: float | Scalar,
    max_restarts: int | Int[Array, ""],
    key: PRNGKeyArray,
    dtype: Any,
) -> tuple[Float[Array, "k n"], Scalar, Int[Array, ""]]:
    """Thick-restart block Lanczos; returns wanted Ritz vectors, radius, restarts.

    Between restarts A V^T = V^T T + F^T C E holds, with F the block after the basis, C
    its coupling to the last block of the basis, E the selector of that block. Ritz
    vector V^T y then has the residual |C E y|.
    """
    block, size = plan.block, plan.basis
    key, first = jax.random.split(key)
    start = jnp.linalg.qr(jax.random.normal(first, (n, block), dtype))[0].T
    zero = jnp.zeros((), jnp.int32)
    state = _State(
        basis=jnp.zeros((size + block, n), dtype).at[:block].set(start),
        projection=jnp.zeros((size, size), dtype),
        coupling=jnp.zeros((block, block), dtype),
        radius=jnp.zeros((), dtype),
        key=key,
        start=zero,
        restarts=zero - 1,
        done=jnp.zeros((), bool),
    )
    wanted = jnp.r_[0 : plan.low, size - plan.high : size]
    kept = jnp.r_[0 : plan.keep_low, size - plan.keep_high : size]
    # The Ritz vectors wanted, as positions among those kept.
    of_kept = jnp.r_[0 : plan.low, plan.keep - plan.high : plan.keep]

    def cycle(state: _State) -> _State:
        """Fill the basis, solve the projected problem, restart from its Ritz pairs."""
        state = jax.lax.fori_loop(
            state.start, size // block, lambda i, s: _expand(product, plan, i, s), state
        )
        projection = 0.5 * (state.projection + state.projection.T)
        values, rotation = jnp.linalg.eigh(projection)
        estimates = jnp.linalg.norm(state.coupling @ rotation[-block:], axis=0)
        radius = jnp.maximum(state.radius, jnp.max(jnp.abs(values)))
        # An estimate that is NaN will not mend: stop as well, the residuals tell.
        done = jnp.all(~(estimates[wanted] > tol * radius))
        ritz = rotation[:, kept].T @ state.basis[:size]
        rows = jnp.arange(plan.keep)
        return state._replace(
            basis=jnp.zeros_like(state.basis)
            .at[: plan.keep]
            .set(ritz)
            .at[plan.keep : plan.keep + block]
            .set(state.basis[size:]),
            projection=jnp.zeros_like(projection).at[rows, rows].set(values[kept]),
            coupling=jnp.zeros_like(state.coupling),
            radius=radius,
            start=jnp.asarray(plan.keep // block, jnp.int32),
            restarts=state.restarts + 1,
            done=done,
        )

    state = jax.lax.while_loop(
        lambda state: ~state.done & (state.restarts < max_restarts), cycle, state
    )
    return state.basis[: plan.keep][of_kept], state.radius, state.restarts


def _expand(
    product: BlockProduct, plan: _Plan, i: Int[Array, ""], state: _State
) -> _State:
    """Multiply block `i` of the basis, record its projection, append the remainder."""
    block, n = plan.block, state.basis.shape[1]
    zero = jnp.zeros_like(i)
    row = i * block
    images = product(jax.lax.dynamic_slice(state.basis, (row, zero), (block, n)))
    radius = jnp.maximum(state.radius, jnp.max(jnp.linalg.norm(images, axis=1)))
    remainder, components = images, jnp.zeros((), images.dtype)
    for _ in range(2):  # Twice is enough (Kahan; Parlett 1980, section 6.9).
        parts = remainder @ state.basis.T
        remainder = remainder - parts @ state.basis
        components = components + parts
    components = components[:, : plan.basis]
    projection = jax.lax.dynamic_update_slice(state.projection, components, (row, zero))
    projection = jax.lax.dynamic_update_slice(projection, components.T, (zero, row))
    key, subkey = jax.random.split(state.key)
    negligible = 100 * jnp.finfo(images.dtype).eps * radius
    following, coupling = _next_block(remainder, state.basis, negligible, subkey)
    return state._replace(
        basis=jax.lax.dynamic_update_slice(state.basis, following, (row + block, zero)),
        projection=projection,
        coupling=coupling,
        radius=radius,
        key=key,
    )


def _next_block(
    remainder: Float[Array, "b n"],
    basis: Float[Array, "rows n"],
    negligible: Scalar,
    key: PRNGKeyArray,
) -> tuple[Float[Array, "b n"], Float[Array, "b b"]]:
    """Orthonormal block that spans `remainder`, and its coupling to it.

    Directions in which the remainder is negligible (the Krylov space is exhausted) are
    replaced by random ones orthogonal to the basis, whose coupling is zero.
    """
    orthonormal, triangle = jnp.linalg.qr(remainder.T)
    left, singular_values, _ = jnp.linalg.svd(triangle)
    exhausted = (singular_values <= negligible)[:, None]
    random = jax.random.normal(key, remainder.shape, remainder.dtype)
    random = random / jnp.linalg.norm(random, axis=1, keepdims=True)
    following = jnp.where(exhausted, random, (orthonormal @ left).T)
    # Scaling up a small remainder has scaled up what was left along the basis.
    following = following - (following @ basis.T) @ basis
    following = jnp.linalg.qr(following.T)[0].T
    return following, jnp.where(exhausted, 0.0, following @ remainder.T)

"""Closed-form predictions of the paper, to be held against measurement.

The paper explains one focus-dilution cycle by linearising the gradient flow at the
saddles it visits. Everything it predicts in closed form is here, as a function of the
chain: rates, directions, spectra and escape times at the first two saddles, the
quantities that the exact flow conserves, the plateaus of the loss. One prediction has
no closed form, the loss of the later saddles; `best_rank_loss` computes it numerically
and says how well.

Signs: rates and eigenvalues belong to the flow's Jacobian J = -Hessian, so a positive
one is unstable. Units: rates in 1/flow time, losses in nats. Phi carries no 1/sqrt(k),
as in the paper; a model with `scale_attention` has c / sqrt(k) for its focus rate.

Left out: the rank-one manifold (`flowsim.invariant`) and the unfolding of the
degenerate point (`flowsim.lyapunov_schmidt`). Nothing here integrates the flow.

>>> import flowsim as fs
>>> chain = fs.lazy_chain([0.75, 0.19, 0.05, 0.01], lam=0.5)
>>> round(float(fs.theory.origin_rate(chain)), 4)
0.4595
>>> round(float(fs.theory.focus_rate(chain)), 4)
0.0798

References:
    Chen, Lin, Xu and Luo (2026), "Focus and Dilution: The Multi-stage Learning Process
    of Attention", arXiv:2605.01199; "the paper" below.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from . import _summary, _trees
from ._types import Scalar
from .conservation import (
    Conserved as Conserved,
    conserved as conserved,
    conserved_drift as conserved_drift,
)
from .loss import PopulationLoss
from .low_rank import (
    BestRankLoss as BestRankLoss,
    RankOutcome as RankOutcome,
    best_rank_loss as best_rank_loss,
)
from .markov import MarkovChain
from .model import AttentionModel


class Condensation(eqx.Module):
    """Where stage I leads: W0 and W1 become rank one along one direction of R^m.

    Attributes:
        alpha: unit vector, the direction in embedding space that both matrices share.
        W0: unit-norm limit of W0 / |W0|, (pi / |pi|) alpha^T.
        W1: unit-norm limit of W1 / |W1|, alpha ((pi - 1/d) / |pi - 1/d|)^T.
        amplitude: both norms grow as amplitude * exp(mu t) while the flow is linear.
    """

    alpha: Float[Array, " m"]
    W0: Float[Array, "d m"]
    W1: Float[Array, "m d"]
    amplitude: Scalar

    def __str__(self) -> str:
        return _summary.aligned("Condensation", vars(self))


class EscapeTimes(eqx.Module):
    """Escape times divided by log(1/eps), in the limit eps -> 0.

    Attributes:
        origin: limit of T_I / log(1/eps), the end of condensation.
        focus: limit of (T_II - T_I) / log(1/eps), the end of focus.
    """

    origin: Scalar
    focus: Scalar

    def __str__(self) -> str:
        return _summary.aligned("EscapeTimes (flow time per log(1/eps))", vars(self))


class Plateaus(eqx.Module):
    """Loss at the first two saddles and its infimum, in nats.

    Attributes:
        origin: log d, uniform predictions.
        second: entropy H(pi) of the stationary law, at theta_c^1.
        floor: entropy rate H(P); no model is below it.
    """

    origin: Scalar
    second: Scalar
    floor: Scalar

    def __str__(self) -> str:
        return _summary.aligned("Plateaus (nats)", vars(self))


def descent_direction(model: AttentionModel, chain: MarkovChain) -> AttentionModel:
    """Velocity of the gradient flow, -grad of the population loss, in closed form.

        W0' = A^T G W1^T + S W0 WK WQ^T + S^T W0 WQ WK^T     W1' = W0^T A^T G
        WQ' = W0^T S W0 WK                                   WK' = W0^T S^T W0 WQ

    with G = diag(pi) (P - p) and S_ij = A_ij (G_i . M_j - G_i . Z_i) = -dL/dPhi.

    Raises:
        ValueError: if model and chain differ in the number of tokens.

    References:
        The paper, setting and gradients.
    """
    W0, W1, WQ, WK = model.W0, model.W1, model.WQ, model.WK
    loss = PopulationLoss(chain)
    attention, logits = loss.attention(model), loss.logits(model)
    pi, P = (x.astype(W0.dtype) for x in (chain.stationary, chain.transition))
    G = pi[:, None] * (P - jax.nn.softmax(logits, axis=-1))
    pull = G @ model.value_logits().T  # G_i . M_j
    S = attention * (pull - jnp.sum(G * logits, axis=-1, keepdims=True))
    if model.scale_attention:
        S = S / jnp.sqrt(jnp.asarray(model.key_width, S.dtype))
    AG = attention.T @ G
    return AttentionModel(
        W0=AG @ W1.T + S @ (W0 @ WK) @ WQ.T + S.T @ (W0 @ WQ) @ WK.T,
        W1=W0.T @ AG,
        WQ=W0.T @ (S @ (W0 @ WK)),
        WK=W0.T @ (S.T @ (W0 @ WQ)),
        scale_attention=model.scale_attention,
    )


def origin_rate(chain: MarkovChain) -> Scalar:
    """Escape rate of the origin, mu = |pi| |pi - 1/d|.

    At theta = 0 the Jacobian has the eigenvalues +mu and -mu, each m-fold, and zeros.
    For the uniform law mu = 0: the origin is then the point theta_c^1 itself.

    References:
        The paper, stage I (condensation).
    """
    return _trees.norm(chain.stationary) * _trees.norm(_excess(chain))


def condensation_direction(model: AttentionModel, chain: MarkovChain) -> Condensation:
    """Rank-one directions to which the linearised flow takes W0 and W1 from `model`.

        alpha ∝ W0^T pi/|pi| + W1 (pi - 1/d)/|pi - 1/d|

    Args:
        model: the (small) initial parameters. A start without any component along the
            unstable directions, or a uniform law, gives zeros and amplitude zero.
        chain: the chain the model learns.

    Raises:
        ValueError: if model and chain differ in the number of tokens.

    References:
        The paper, stage I (condensation), with Lemma 3.1 for the error of linearising.
    """
    embedding, readout, row, column = _origin_coordinates(model, chain)
    unstable = embedding + readout
    alpha = _unit(unstable)
    return Condensation(
        alpha=alpha,
        W0=jnp.outer(row, alpha),
        W1=jnp.outer(alpha, column),
        # The unstable part has norm |x + y| / sqrt(2), split evenly over W0 and W1.
        amplitude=0.5 * _trees.norm(unstable),
    )


def linearised_origin_flow(
    model: AttentionModel, chain: MarkovChain, t: Float[ArrayLike, ""]
) -> AttentionModel:
    """Exact solution at flow time t of the flow linearised at the origin.

        x = W0^T pi/|pi|, y = W1 (pi - 1/d)/|pi - 1/d|:   x' = mu y,  y' = mu x

    while everything orthogonal, WQ and WK stand still. Map over t for a path.

    Args:
        model: parameters at t = 0.
        chain: the chain the model learns.
        t: flow time; one number.

    Raises:
        ValueError: if model and chain differ in the number of tokens.

    References:
        The paper, stage I (condensation).
    """
    x, y, row, column = _origin_coordinates(model, chain)
    angle = origin_rate(chain).astype(x.dtype) * jnp.asarray(t, x.dtype)
    cosh_minus_one, sinh = 2 * jnp.sinh(0.5 * angle) ** 2, jnp.sinh(angle)
    return AttentionModel(
        W0=model.W0 + jnp.outer(row, cosh_minus_one * x + sinh * y),
        W1=model.W1 + jnp.outer(cosh_minus_one * y + sinh * x, column),
        WQ=model.WQ,
        WK=model.WK,
        scale_attention=model.scale_attention,
    )


def second_critical_point(
    chain: MarkovChain,
    *,
    width: int,
    key_width: int | None = None,
    alpha: Float[ArrayLike, " m"] | None = None,
    scale_attention: bool = False,
) -> AttentionModel:
    """The critical point theta_c^1 that condensation ends near: every p_i equals pi.

        W0 = a (pi/|pi|) alpha^T,  W1 = alpha (a l/|l|)^T,  WQ = WK = 0,
        l = log pi - mean(log pi),  a = sqrt(|l|/|pi|)

    It is the balanced representative (|W0| = |W1|) of a whole family; from initial
    scale eps the flow passes the family within O(eps^2) of it.

    Args:
        chain: the chain; only its stationary law enters.
        width: embedding width m.
        key_width: key width k; `width` when absent.
        alpha: direction in embedding space, normalised here. Default: the first axis.
        scale_attention: option of the model returned.

    Raises:
        ValueError: for sizes below one, or an alpha of wrong shape or zero length.

    References:
        The paper, stage II (focus).
    """
    key_width = width if key_width is None else key_width
    for name, size in (("width", width), ("key_width", key_width)):
        if size < 1:
            raise ValueError(f"{name} must be a positive integer; got {size}.")
    pi, log_pi = chain.stationary, _centred_log(chain)
    alpha = _unit(_as_direction(alpha, width, pi.dtype))
    balance = jnp.sqrt(_trees.norm(log_pi) / _trees.norm(pi))
    zeros = jnp.zeros((width, key_width), pi.dtype)
    return AttentionModel(
        W0=balance * jnp.outer(_unit(pi), alpha),
        W1=balance * jnp.outer(alpha, _unit(log_pi)),
        WQ=zeros,
        WK=zeros,
        scale_attention=scale_attention,
    )


def outer_eigenvalues(chain: MarkovChain) -> Float[Array, " values"]:
    """The d - 1 non-zero eigenvalues of the (W0, W1) block at theta_c^1, ascending.

        -F^{1/2} (|pi|^2 b b^T + a^2 |pi|^2 I) F^{1/2},
        F = diag(pi) - pi pi^T,  b = a l/|l|

    All are negative (zero for the uniform law): without attention theta_c^1 attracts.

    References:
        The paper, stage II (focus).
    """
    pi, log_pi = chain.stationary, _centred_log(chain)
    root = jnp.sqrt(pi)
    # F = B B^T with B = diag(root) Q, the d - 1 columns of Q orthonormal and orthogonal
    # to root: the zero eigenvalue of F never enters.
    reflected = root.at[0].add(1.0)
    householder = jnp.eye(pi.size, dtype=pi.dtype) - jnp.outer(reflected, reflected) / (
        1.0 + root[0]
    )
    B = root[:, None] * householder[:, 1:]
    along = _unit(log_pi) @ B
    scale = _trees.norm(pi) * _trees.norm(log_pi)  # = a^2 |pi|^2 = |pi|^2 |b|^2
    return jnp.linalg.eigvalsh(-scale * (B.T @ B + jnp.outer(along, along)))


def focus_rate(chain: MarkovChain) -> Scalar:
    """Growth rate c of attention at theta_c^1; its sign says towards which tokens.

        c = a^2 (pi/|pi| . r) (q . pi/|pi|),
        r_i = pi_i (P_i - pi) . l,   q_j = pi_j (pi_j/|pi|^2 - 1)

    The attention block has the eigenvalues +c and -c, each k-fold. If c > 0 attention
    moves to frequent tokens (Phi to a positive multiple of pi pi^T), if c < 0 away from
    them. As q . pi >= 0, the sign is that of pi . r, the question whether frequent
    tokens are followed by more frequent ones than pi; for a lazy chain, that of lam.

    References:
        The paper, stage II (focus).
    """
    pi, log_pi = chain.stationary, _centred_log(chain)
    squared = pi @ pi
    balance_squared = _trees.norm(log_pi) / jnp.sqrt(squared)
    r = pi * (chain.transition @ log_pi - pi @ log_pi)
    q = pi * (pi / squared - 1.0)
    return balance_squared * (pi @ r) * (q @ pi) / squared


def focus_directions(
    chain: MarkovChain,
    *,
    width: int,
    key_width: int | None = None,
    alpha: Float[ArrayLike, " m"] | None = None,
) -> AttentionModel:
    """Orthonormal basis of the unstable eigenspace at theta_c^1, eigenvalue |c|.

        WQ = alpha e_j^T / sqrt(2),  WK = sign(c) WQ,  W0 = W1 = 0,   j = 1 ... k

    Args:
        chain, width, key_width, alpha: as in `second_critical_point`.

    Returns:
        The k directions, stacked along a leading axis of every leaf. (For c = 0 there
        is no such eigenspace; the directions then belong to the kernel.)

    References:
        The paper, stage II (focus).
    """
    point = second_critical_point(chain, width=width, key_width=key_width, alpha=alpha)
    alpha = _unit(_as_direction(alpha, width, point.W0.dtype))
    axes = jnp.eye(point.key_width, dtype=alpha.dtype)
    WQ = jnp.sqrt(0.5) * jax.vmap(jnp.outer, in_axes=(None, 0))(alpha, axes)
    sign = jnp.where(focus_rate(chain) < 0, -1.0, 1.0).astype(WQ.dtype)
    batch = (point.key_width,)
    return AttentionModel(
        W0=jnp.zeros(batch + point.W0.shape, WQ.dtype),
        W1=jnp.zeros(batch + point.W1.shape, WQ.dtype),
        WQ=WQ,
        WK=sign * WQ,
    )


def escape_times(chain: MarkovChain) -> EscapeTimes:
    """Slopes of the escape times in log(1/eps): 1/mu, then 1/|c|; inf for a zero rate.

        T_I / log(1/eps) -> 1/mu,   (T_II - T_I) / log(1/eps) -> 1/|c|    as eps -> 0

    References:
        The paper, Lemma 3.1 and stages I and II.
    """
    return EscapeTimes(
        origin=1.0 / origin_rate(chain), focus=1.0 / jnp.abs(focus_rate(chain))
    )


def plateaus(chain: MarkovChain) -> Plateaus:
    """Losses log d, H(pi) and H(P) of the origin, of theta_c^1, and of the floor."""
    return Plateaus(
        origin=jnp.log(jnp.asarray(chain.num_states, chain.stationary.dtype)),
        second=jnp.asarray(chain.unigram_entropy),
        floor=jnp.asarray(chain.entropy_rate),
    )


def _centred_log(chain: MarkovChain) -> Float[Array, " d"]:
    """l = log pi - mean(log pi)."""
    log_pi = jnp.log(chain.stationary)
    return log_pi - jnp.mean(log_pi)


def _excess(chain: MarkovChain) -> Float[Array, " d"]:
    """pi - 1/d."""
    return chain.stationary - 1.0 / chain.num_states


def _unit(x: Float[Array, " n"]) -> Float[Array, " n"]:
    """x / |x|, and zero for x = 0."""
    length = _trees.norm(x)
    return x / jnp.where(length > 0, length, 1.0)


def _origin_coordinates(model: AttentionModel, chain: MarkovChain):
    """x = W0^T pi/|pi| and y = W1 (pi - 1/d)/|pi - 1/d|, with the two unit vectors."""
    if model.vocab != chain.num_states:
        raise ValueError(
            f"the model has vocab {model.vocab} but the chain has {chain.num_states} "
            "states; they must be equal."
        )
    row, column = (
        _unit(x).astype(model.W0.dtype) for x in (chain.stationary, _excess(chain))
    )
    return model.W0.T @ row, model.W1 @ column, row, column


def _as_direction(alpha, width: int, dtype) -> Float[Array, " m"]:
    """`alpha` as a checked array; the first axis when absent."""
    if alpha is None:
        return jnp.zeros((width,), dtype).at[0].set(1.0)
    alpha = jnp.asarray(alpha, dtype)
    if alpha.shape != (width,):
        raise ValueError(f"alpha must have shape ({width},); got {alpha.shape}.")
    if not _trees.is_traced(alpha) and not np.linalg.norm(np.asarray(alpha)) > 0:
        raise ValueError("alpha must not be zero; its direction is what counts.")
    return alpha

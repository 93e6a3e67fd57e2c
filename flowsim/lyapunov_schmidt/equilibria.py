"""All equilibria of a small polynomial field in a ball, with a proof of completeness.

Boxes are discarded, certified or halved. Around a box's centre c the polynomial is
known exactly, so over the box |u - c| <= h (largest component) there are bounds:

- no equilibrium, if in some component |f(c)| exceeds the sum of all other terms;
- exactly one in the box, if with Y = Df(c)^-1 the field Y f differs from u - c by a map
  with Lipschitz constant q < 1 and |Y f(c)| <= (1 - q) h;
- none, if |Y f(c)| > (1 + q) h.

Every box ends one way or the other unless an equilibrium is degenerate; boxes left over
when they are as small as allowed are reported, and then the list is not complete.

References:
    Moore, Kearfott and Cloud (2009), "Introduction to Interval Analysis", chapter 8.
    Neumaier (1990), "Interval Methods for Systems of Equations", section 5.
"""

from collections.abc import Sequence

import equinox as eqx
import numpy as np
from jaxtyping import Complex, Float

from .. import _summary
from .taylor import Polynomial, TaylorField

_MAX_BOXES = 400_000


class Stability(eqx.Enumeration):
    """What an equilibrium is to the flow u' = f(u)."""

    stable = "stable"
    saddle = "saddle"
    source = "source"
    degenerate = "an eigenvalue of real part zero"


class Equilibria(eqx.Module):
    """All equilibria of a polynomial field in a ball around the origin.

    Attributes:
        points: the equilibria, ordered by distance from the origin.
        eigenvalues: of the Jacobian at each, by rising real part (1 / flow time).
        radius: of the ball.
        complete: whether every part of the ball was settled, up to round-off; false
            beside degenerate equilibria, and where boxes ran out.
        num_unresolved: boxes left over.
        delta: the parameter they belong to, where there is one.
    """

    points: Float[np.ndarray, "q r"]
    eigenvalues: Complex[np.ndarray, "q r"]
    radius: float
    complete: bool
    num_unresolved: int
    delta: float | None = None

    def __len__(self) -> int:
        return len(self.points)

    @property
    def stability(self) -> tuple[Stability, ...]:
        """Stable, saddle or source, for each."""
        return tuple(map(_classify, self.eigenvalues))

    def count(self, kind: Stability) -> int:
        """How many are of one kind."""
        return sum(bool(kind == found) for found in self.stability)

    @property
    def index_sum(self) -> int:
        """Sum of the signs of det Df.

        It does not change with delta as long as no equilibrium crosses the sphere
        (Poincare and Hopf), which checks the list independently.
        """
        products = np.asarray(np.prod(self.eigenvalues, axis=1))
        signs = np.sign(np.real(products))
        return int(np.sum(signs))

    def __str__(self) -> str:
        rows = {
            "delta": self.delta,
            "equilibria": len(self),
            "stable": self.count(Stability.stable),
            "saddles": self.count(Stability.saddle),
            "sources": self.count(Stability.source),
            "degenerate": self.count(Stability.degenerate),
            "index sum": self.index_sum,
            "complete": self.complete,
            "in ball of": self.radius,
        }
        return _summary.aligned("Equilibria", rows)


def equilibria(
    field: Polynomial | TaylorField,
    *,
    radius: float,
    delta: float | None = None,
    smallest: float = 1e-7,
) -> Equilibria:
    """Every u with f(u) = 0 and |u| <= radius, each with its stability.

    Args:
        field: a polynomial, or a Taylor field with `delta`. Meant for few coordinates;
            the work grows exponentially with their number.
        radius: of the ball. A Taylor field is a picture of the true one only where its
            neglected terms are small.
        delta: parameter at which a Taylor field is taken.
        smallest: half-width of the smallest box, over the radius.

    Raises:
        ValueError: for a radius that is not positive, a missing delta, or more than
            four coordinates.
    """
    if not radius > 0:
        raise ValueError(f"radius must be positive; got {radius}.")
    if isinstance(field, TaylorField):
        if delta is None:
            raise ValueError("delta must be given with a Taylor field.")
        field = field.at(delta)
    if field.dimension > 4:
        raise ValueError(
            f"at most 4 kernel coordinates can be searched; got {field.dimension}."
        )
    roots, left_over = _search(field, radius, smallest)
    roots = roots[np.linalg.norm(roots, axis=1) <= radius]
    roots = roots[np.argsort(np.linalg.norm(roots, axis=1))]
    values = np.linalg.eigvals(field.shifted(roots)[1]).astype(complex)
    values = np.take_along_axis(values, np.argsort(np.real(values), axis=1), axis=1)
    return Equilibria(
        points=roots,
        eigenvalues=values,
        radius=float(radius),
        complete=left_over == 0,
        num_unresolved=left_over,
        delta=None if delta is None else float(delta),
    )


def branches(
    field: TaylorField, deltas: Sequence[float], *, radius: float
) -> tuple[Equilibria, ...]:
    """The equilibria at each of several parameters."""
    return tuple(equilibria(field, radius=radius, delta=delta) for delta in deltas)


def _search(field: Polynomial, radius: float, smallest: float):
    r = field.dimension
    centres, half = np.zeros((1, r)), float(radius)
    corners = np.stack(np.meshgrid(*[[-0.5, 0.5]] * r, indexing="ij"), -1)
    corners = corners.reshape(-1, r)
    roots: list[np.ndarray] = []
    while len(centres) and half > smallest * radius and len(centres) <= _MAX_BOXES:
        settled, found = _settle(field, centres, half)
        roots.extend(found)
        centres = (centres[~settled][:, None] + half * corners).reshape(-1, r)
        half = half / 2
    return _distinct(roots, radius, r), len(centres)


def _settle(field: Polynomial, centres: np.ndarray, half: float):
    """Which boxes are done with, and the equilibria certified in them."""
    # Boxes overlap a little, so that an equilibrium on a common face belongs to both.
    half = 1.5 * half
    terms = field.shifted(centres)
    sizes = [_row_sums(term) for term in terms]  # (B, r) each
    others = sum(size * half**k for k, size in enumerate(sizes) if k)
    settled = np.any(np.abs(terms[0]) > others, axis=1)
    open_ = np.flatnonzero(~settled)
    found: list[np.ndarray] = []
    jacobians = terms[1][open_]
    regular = np.linalg.cond(jacobians) < 1e12 if len(open_) else np.zeros(0, bool)
    open_, inverses = open_[regular], np.linalg.inv(jacobians[regular])
    steps = np.einsum("bij,bj->bi", inverses, terms[0][open_])
    lipschitz = np.zeros(len(open_))
    for k in range(2, field.degree + 1):
        bent = np.einsum("bij,bj...->bi...", inverses, terms[k][open_])
        lipschitz += k * half ** (k - 1) * np.max(_row_sums(bent), axis=1)
    length = np.max(np.abs(steps), axis=1)
    one = length <= (1 - lipschitz) * half
    none = (lipschitz < 1) & (length > (1 + lipschitz) * half)
    settled[open_[none]] = True
    for row in open_[one]:
        root = _polish(field, centres[row])
        if np.max(np.abs(root - centres[row])) <= 1.01 * half:
            settled[row] = True
            found.append(root)
    return settled, found


def _row_sums(term: np.ndarray) -> np.ndarray:
    """Sum of |entries| over all but the first two axes (box, component)."""
    return np.sum(np.abs(term), axis=tuple(range(2, term.ndim)))


def _polish(field: Polynomial, u: np.ndarray) -> np.ndarray:
    for _ in range(50):
        value, jacobian = field.shifted(u)[:2]
        step = np.linalg.solve(jacobian, value)
        u = u - step
        if np.max(np.abs(step)) <= 4 * np.finfo(float).eps * np.max(np.abs(u)):
            break
    return u


def _distinct(roots: list[np.ndarray], radius: float, dimension: int) -> np.ndarray:
    """Overlapping boxes certify the same equilibrium more than once."""
    kept: list[np.ndarray] = []
    for root in roots:
        if all(np.max(np.abs(root - other)) > 1e-9 * radius for other in kept):
            kept.append(root)
    return np.array(kept).reshape(-1, dimension)


def _classify(eigenvalues: np.ndarray) -> Stability:
    real, size = np.real(eigenvalues), np.max(np.abs(eigenvalues), initial=0.0)
    if np.any(np.abs(real) <= 1e-10 * size):
        return Stability.degenerate
    if np.all(real < 0):
        return Stability.stable
    return Stability.source if np.all(real > 0) else Stability.saddle

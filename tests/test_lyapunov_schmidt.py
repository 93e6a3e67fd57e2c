"""Lyapunov-Schmidt reduction: exact normal forms behind a hidden range."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowsim import _trees
from flowsim.lyapunov_schmidt import (
    Polynomial,
    Stability,
    equilibria,
    reduced_field,
    solve_range,
    split,
)

A, B, C = 0.3, 1.5, 2.9


class NormalForm(eqx.Module):
    """V = -mu (e . u + h |u|^2 / 2) - cubic[u, u, u] - quartic[u^2, u^2], u' = -dV/du.

    Numbers are data: forms with the same number of variables compile once.
    """

    linear: jax.Array
    square: jax.Array
    cubic: jax.Array
    quartic: jax.Array

    @classmethod
    def of(cls, r, *, linear=0.0, square=1.0, cubic=None, quartic=None):
        return cls(
            jnp.full(r, linear),
            jnp.asarray(square),
            jnp.zeros((r, r, r)) if cubic is None else jnp.asarray(cubic),
            jnp.zeros((r, r)) if quartic is None else jnp.asarray(quartic),
        )

    def __call__(self, u, mu):
        bent = self.cubic @ u @ u @ u + u**2 @ self.quartic @ u**2
        return -mu * (self.linear @ u + self.square * u @ u / 2) - bent


def tetrahedron():
    """x1' = mu x1 + a x2 x3 - b x1^3 - c x1 (x2^2 + x3^2) and cyclic."""
    cubic = np.zeros((3, 3, 3))
    cubic[0, 1, 2] = A
    return NormalForm.of(
        3, cubic=cubic, quartic=-C * np.ones((3, 3)) / 4 - (B - C) * np.eye(3) / 4
    )


FORMS = {
    "pitchfork": NormalForm.of(1, quartic=-np.eye(1) / 4),
    "transcritical": NormalForm.of(1, cubic=-np.ones((1, 1, 1)) / 3),
    "fold": NormalForm.of(1, linear=1.0, square=0.0, cubic=-np.ones((1, 1, 1)) / 3),
    "two modes": NormalForm.of(2, quartic=-np.eye(2) / 4),
    "tetrahedron": tetrahedron(),
}


class Hidden(eqx.Module):
    """A normal form in the kernel of a larger space, turned by a rotation.

        V(u, mu) + sum_i s_i (w_i - phi_i(u, mu))^2 / 2,   y = Q (u, w)

    The range equation has the solution w = phi(u, mu), so the reduced potential is V.
    """

    form: NormalForm
    rotation: jax.Array

    @classmethod
    def of(cls, name, size=6):
        normal = jax.random.normal(jax.random.key(7), (size, size))
        return cls(FORMS[name], jnp.linalg.qr(normal)[0])

    @property
    def dimension(self):
        return self.form.linear.size

    @property
    def kernel(self):
        return self.rotation.T[: self.dimension]

    @property
    def size(self):
        return self.rotation.shape[0]

    def range_part(self, u, mu):
        i = jnp.arange(1.0, self.size - u.size + 1)
        return jnp.sin(i * jnp.sum(u**2) + i * mu) + u[0] ** 2 / i + mu * u[-1]

    def __call__(self, y, mu):
        z = y @ self.rotation
        u, w = z[: self.dimension], z[self.dimension :]
        stiff = jnp.linspace(1.0, 3.0, w.size)
        return self.form(u, mu) + 0.5 * stiff @ (w - self.range_part(u, mu)) ** 2


@pytest.fixture(scope="module")
def reduced():
    """Family, splitting in the known basis, and Taylor field of every normal form."""
    found = {}
    for name in FORMS:
        family = Hidden.of(name)
        splitting = split(family, jnp.zeros(family.size), kernel=family.kernel)
        found[name] = family, splitting, reduced_field(family, splitting, order=3)
    return found


def exact_terms(name):
    """Coefficients of the normal forms: (component, powers of u and mu) -> number."""
    r = FORMS[name].linear.size
    unit = np.eye(r + 1, dtype=int)
    mu = unit[r]
    terms = {}
    for i in range(r):
        x = unit[i]
        if name == "fold":
            terms |= {(i, tuple(mu)): 1.0, (i, tuple(2 * x)): -1.0}
            continue
        terms[i, tuple(x + mu)] = 1.0
        if name == "transcritical":
            terms[i, tuple(2 * x)] = -1.0
        elif name != "tetrahedron":
            terms[i, tuple(3 * x)] = -1.0
        else:
            y, z = unit[(i + 1) % 3], unit[(i + 2) % 3]
            terms |= {
                (i, tuple(y + z)): A,
                (i, tuple(3 * x)): -B,
                (i, tuple(x + 2 * y)): -C,
                (i, tuple(x + 2 * z)): -C,
            }
    return terms


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_every_coefficient_up_to_third_order_is_exact(reduced, name):
    field = reduced[name][2]
    expected = exact_terms(name)
    powers = np.stack(
        np.meshgrid(*[range(4)] * (field.dimension + 1), indexing="ij"), -1
    ).reshape(-1, field.dimension + 1)
    powers = powers[powers.sum(1) <= 3]
    for component in range(field.dimension):
        for exponents in powers:
            key = component, tuple(int(e) for e in exponents)
            found = field.coefficient(component, key[1])
            assert found == pytest.approx(expected.get(key, 0.0), abs=1e-11), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mu", "counts"),
    [
        # stable, saddles, sources
        ("pitchfork", -1e-3, (1, 0, 0)),
        ("pitchfork", 1e-3, (2, 0, 1)),
        ("transcritical", -1e-3, (1, 0, 1)),
        ("transcritical", 1e-3, (1, 0, 1)),
        ("fold", -1e-3, (0, 0, 0)),
        ("fold", 1e-3, (1, 0, 1)),
        ("two modes", -1e-3, (1, 0, 0)),
        ("two modes", 1e-3, (4, 4, 1)),
    ],
)
def test_all_equilibria_of_the_normal_forms_are_found(reduced, name, mu, counts):
    found = equilibria(reduced[name][2], radius=0.3, delta=mu)
    kinds = (Stability.stable, Stability.saddle, Stability.source)
    assert found.complete
    assert tuple(map(found.count, kinds)) == counts
    assert len(found) == sum(counts)


@pytest.mark.slow
def test_the_tetrahedral_system_has_9_equilibria_before_and_15_after(reduced):
    field = reduced["tetrahedron"][2]
    before, after = (equilibria(field, radius=0.3, delta=mu) for mu in (-1e-3, 1e-3))
    assert before.complete and after.complete
    assert (len(before), len(after)) == (9, 15)
    assert before.index_sum == after.index_sum
    # Along the axes +-sqrt(mu / b); on diagonals mu + a s - (b + 2 c) s^2 = 0.
    on_axes = [p for p in after.points if np.sum(np.abs(p) > 1e-6) == 1]
    assert len(on_axes) == 6
    np.testing.assert_allclose(
        np.linalg.norm(on_axes, axis=1), np.sqrt(1e-3 / B), rtol=1e-9
    )
    for found, mu in ((before, -1e-3), (after, 1e-3)):
        sizes = np.roots([-(B + 2 * C), A, mu])
        diagonal = [p for p in found.points if np.all(np.abs(p) > 1e-6)]
        assert len(diagonal) == 8
        signed = [abs(p[0]) * np.sign(np.prod(p)) for p in diagonal]
        np.testing.assert_allclose(
            np.sort(signed), np.sort(np.repeat(sizes, 4)), rtol=1e-9
        )


@pytest.mark.slow
def test_the_kernel_found_without_a_basis_gives_the_same_equilibria():
    family = Hidden.of("two modes")
    splitting = split(family, jnp.zeros(family.size))
    assert splitting.kernel.shape == (2, 6) and splitting.nullity == 2
    field = reduced_field(family, splitting)
    found = equilibria(field, radius=0.3, delta=1e-3)
    assert found.complete and found.count(Stability.saddle) == 4
    distances = np.sort(np.linalg.norm(found.points, axis=1))
    expected = np.sqrt(1e-3) * np.repeat([0.0, 1.0, np.sqrt(2)], [1, 4, 4])
    np.testing.assert_allclose(distances, expected, atol=1e-10)


@pytest.mark.slow
def test_the_range_equation_is_solved_exactly_away_from_the_point(reduced):
    family, splitting, field = reduced["two modes"]
    u, mu = jnp.array([0.05, -0.03]), 0.02
    solved = solve_range(family, splitting, u, mu)
    assert bool(solved.succeeded) and float(solved.residual) < 1e-13
    z = solved.params @ family.rotation
    np.testing.assert_allclose(z[:2], u, atol=1e-14)
    np.testing.assert_allclose(z[2:], family.range_part(u, mu), atol=1e-12)
    np.testing.assert_allclose(solved.field, mu * u - u**3, atol=1e-13)
    np.testing.assert_allclose(field(u, mu), solved.field, atol=1e-13)
    back, w = splitting.coordinates(solved.params)
    np.testing.assert_allclose(back, u, atol=1e-14)
    np.testing.assert_allclose(w, solved.w, atol=1e-13)


@pytest.mark.slow
def test_an_unsolved_range_equation_says_so(reduced):
    family, splitting, _ = reduced["two modes"]
    solved = solve_range(family, splitting, jnp.array([0.3, 0.2]), 0.1, max_steps=0)
    assert not bool(solved.succeeded) and float(solved.residual) > 1e-3


def ring(y, mu):
    """A circle of critical points |(y0, y1)| = 1; across it a pitchfork in y2."""
    radius = y[0] ** 2 + y[1] ** 2
    return (radius - 1 + y[2] ** 2) ** 2 / 4 - mu * y[2] ** 2 / 2 + y[2] ** 4 / 4


@pytest.mark.slow
def test_symmetry_directions_are_kept_out_of_the_kernel():
    point = jnp.array([0.6, 0.8, 0.0])

    def turning(y):
        return jnp.stack([jnp.array([-y[1], y[0], 0.0 * y[2]])])

    blind = split(ring, point)
    assert blind.kernel.shape[0] == 2 and blind.symmetry.shape[0] == 0
    splitting = split(ring, point, symmetries=turning)
    assert splitting.kernel.shape[0] == 1 and splitting.symmetry.shape[0] == 1
    np.testing.assert_allclose(np.abs(splitting.kernel), [[0, 0, 1]], atol=1e-12)
    field = reduced_field(ring, splitting)
    assert field.coefficient(0, (1, 1)) == pytest.approx(1.0, abs=1e-12)
    assert field.coefficient(0, (3, 0)) == pytest.approx(-1.0, abs=1e-12)
    found = equilibria(field, radius=0.5, delta=0.01)
    assert len(found) == 3 and found.complete
    # Blind to the symmetry, equilibria come in curves, and the search says so.
    assert not equilibria(
        reduced_field(ring, blind), radius=0.3, delta=0.01, smallest=1e-2
    ).complete


@pytest.mark.slow
def test_kernel_directions_not_asked_for_are_held(reduced):
    family = Hidden.of("two modes")
    splitting = split(family, jnp.zeros(family.size), kernel=family.kernel[:1])
    assert splitting.held.shape[0] == 1
    np.testing.assert_allclose(splitting.held @ family.kernel[0], 0.0, atol=1e-12)
    np.testing.assert_allclose(abs(splitting.held @ family.kernel[1]), 1.0, rtol=1e-12)


def test_degenerate_equilibria_are_reported_as_incomplete():
    double = Polynomial((np.zeros(1), np.zeros((1, 1)), np.ones((1, 1, 1))))
    found = equilibria(double, radius=1.0)
    assert not found.complete and found.num_unresolved > 0


def test_random_polynomials_have_as_many_real_roots_as_their_companion_matrix():
    rng = np.random.default_rng(0)
    for _ in range(20):
        numbers = rng.normal(size=5)
        shapes = [(1,) * (k + 1) for k in range(5)]
        field = Polynomial(
            tuple(np.full(s, c) for s, c in zip(shapes, numbers, strict=True))
        )
        roots = np.roots(numbers[::-1])
        real = np.sort(roots[np.abs(roots.imag) < 1e-9].real)
        found = equilibria(field, radius=50.0)
        assert found.complete
        np.testing.assert_allclose(np.sort(found.points[:, 0]), real, rtol=1e-7)


def test_a_shifted_polynomial_is_the_same_function():
    rng = np.random.default_rng(1)
    terms = [rng.normal(size=(2,)), rng.normal(size=(2, 2))]
    square = rng.normal(size=(2, 2, 2))
    terms.append(square + square.transpose(0, 2, 1))
    field = Polynomial(tuple(terms))
    centre, u = rng.normal(size=(2, 2))
    around = Polynomial(tuple(field.shifted(centre)))
    np.testing.assert_allclose(around(u - centre), field(u), rtol=1e-12)
    direct = terms[0] + terms[1] @ u + terms[2] @ u @ u
    np.testing.assert_allclose(field(u), direct, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, s, t: reduced_field(f, s, order=0), "order must be at least 1"),
        (lambda f, s, t: equilibria(t, radius=1.0), "delta must be given"),
        (lambda f, s, t: equilibria(t, radius=0.0, delta=0.0), "radius must be pos"),
        (lambda f, s, t: t.coefficient(0, (4, 0, 0)), "powers must be 3 exponents"),
        (
            lambda f, s, t: split(f, s.point, kernel=np.asarray(s.range_)[:1]),
            "kernel must consist of null directions",
        ),
    ],
)
def test_wrong_input_is_refused(reduced, call, message):
    with pytest.raises(ValueError, match=message):
        call(*reduced["two modes"])


def test_single_precision_is_refused():
    with pytest.raises(ValueError, match="double precision"):
        split(ring, jnp.zeros(3, jnp.float32))


@pytest.mark.slow
def test_results_print_short(reduced):
    _, splitting, field = reduced["two modes"]
    for result in (splitting, field, equilibria(field, radius=0.3, delta=1e-3)):
        assert 3 <= len(str(result).splitlines()) < 14
    assert _trees.num_params(splitting.point) == 6

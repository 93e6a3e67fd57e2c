"""Events on curves through saved points."""

import numpy as np

from flowsim._curves import crossings, spline


def test_crossings_of_a_sine_are_located_to_high_order():
    errors = []
    for number in (20, 40, 80):
        ts = np.linspace(0.5, 7.0, number)
        errors.append(np.max(np.abs(crossings(ts, np.sin(ts)) - [np.pi, 2 * np.pi])))
    # Fourth order: halving the spacing divides the error by sixteen, roughly.
    assert errors[0] > 8 * errors[1] > 64 * errors[2] > 0


def test_levels_and_directions_are_respected():
    ts = np.linspace(0.0, 7.0, 200)
    half = crossings(ts, np.sin(ts), 0.5)
    np.testing.assert_allclose(half, [np.pi / 6, 5 * np.pi / 6, 13 * np.pi / 6], 1e-6)
    np.testing.assert_allclose(
        crossings(ts, np.sin(ts), 0.5, rising=True), half[[0, 2]], 1e-14
    )
    assert crossings(ts, np.sin(ts), 2.0).size == 0


def test_the_spline_passes_through_the_points():
    ts = np.array([0.0, 1.0, 2.5, 4.0])
    np.testing.assert_allclose(spline(ts, ts**2)(ts), ts**2, atol=1e-14)
    assert abs(spline(ts, ts**3)(3.0) - 27.0) < 1e-12

"""Diffrax solvers that gradient flow deserves and Diffrax lacks.

`SymmetricBDF` with `BDFController` integrates stiff flows with a symmetric Jacobian,
gradient flows above all, without forming or factorising a matrix.
`RungeKuttaChebyshev` is its explicit companion for moderate accuracy.
"""

from ._bdf import BDFState, SymmetricBDF
from ._chebyshev import ChebyshevState, RungeKuttaChebyshev
from ._controller import BDFController, BDFControllerState, StepReport
from ._interpolation import BackwardDifferenceInterpolation
from ._newton import NewtonCG

__all__ = [
    "BDFController",
    "BDFControllerState",
    "BDFState",
    "BackwardDifferenceInterpolation",
    "ChebyshevState",
    "NewtonCG",
    "RungeKuttaChebyshev",
    "StepReport",
    "SymmetricBDF",
]

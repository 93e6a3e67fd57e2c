"""The theory's predictions held against measurement: one table, one row per claim.

Each row has a statement, where it comes from, the predicted and the measured number,
the relative error with its tolerance, and a verdict: *agrees*; *differs*, a documented
departure from the paper for which the corrected claim is given and holds; *fails*.
Beside claims stand controls: the same measurement where the theory predicts nothing to
happen.

Left out: the rank-one manifold and the unfolding of the degenerate critical point,
which have their own modules; printing and files, which the command line does.

>>> from flowsim.verification import Verdict, compare
>>> claim = compare("2 + 2 = 4", "arithmetic", predicted=4, measured=2 + 2, tolerance=0)
>>> bool(claim.verdict == Verdict.agrees)
True

The whole table takes a minute or two, most of it compiling::

    table = verify()
    print(table)
    assert table.succeeded
"""

from .claims import Claim, Verdict, Verification, compare, depart
from .empirical import verify_empirical
from .verify import verify

__all__ = [
    "Claim",
    "Verdict",
    "Verification",
    "compare",
    "depart",
    "verify",
    "verify_empirical",
]

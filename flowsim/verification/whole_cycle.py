"""Claims about a whole run: what is conserved, the plateaus, and the repetition."""

import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import _trees, theory
from ..derivatives import linearise
from ..loss import PopulationLoss
from ..low_rank import RankOutcome
from ..model import AttentionModel
from ..stages import Stage, Stages
from ..trajectory import Trajectory
from ..visits import VisitedPoint
from .claims import Claim, compare

_INVARIANCE, _CYCLE = "invariances", "stages I-IV"


def conservation_claims(loss: PopulationLoss, run: Trajectory) -> list[Claim]:
    """Three conserved quantities, a control that is not, and dissipation.

    The drift is measured against the largest squared norm of the weights (largest norm
    for W1 1), which an integration error of size rtol per step would change.
    """
    models: AttentionModel = run.models
    drift = theory.conserved_drift(models)
    size = float(jnp.sqrt(jnp.max(_squared_norms(models))))
    claims = [
        compare(
            f"conserved: {name}",
            _INVARIANCE,
            0.0,
            drift[key],
            1e-5,
            f"largest change of an entry up to t = {float(run.ts[-1]):g}; scale {what}",
            scale=scale,
        )
        for name, key, scale, what in (
            (
                "W0^T W0 - W1 W1^T - WQ WQ^T - WK WK^T",
                "embedding_balance",
                size**2,
                "largest |theta|^2",
            ),
            ("WQ^T WQ - WK^T WK", "key_balance", size**2, "largest |theta|^2"),
            ("W1 1", "readout_sum", size, "largest |theta|"),
        )
    ]
    attention, rest = (float(value) for value in _balances(models))
    dissipated = float(_dissipated(loss, run.ts, models))
    return [
        *claims,
        compare(
            "control: W0^T W0 - W1 W1^T alone is not conserved",
            _INVARIANCE,
            attention,
            rest,
            1e-4,
            "norm of its change; predicted: that of WQ WQ^T + WK WK^T",
        ),
        compare(
            "dissipation: L(0) - L(t) = integral of |grad L|^2",
            "gradient flow",
            run.losses[0] - run.losses[-1],
            dissipated,
            1e-4,
            "trapezoid with end corrections from Hessian-vector products",
        ),
        compare(
            "dissipation: the loss never rises",
            "gradient flow",
            0.0,
            max(0.0, float(np.max(np.diff(np.asarray(run.losses))))),
            1e-12,
            "largest rise between saved points; scale L(0)",
            scale=run.losses[0],
        ),
    ]


class Approach(eqx.Module):
    """A saddle near a run, and how its distance scales with eps.

    Attributes:
        loss, index: of the saddle.
        distance, time: of closest approach in the run from the smaller eps.
        exponent: d log(distance) / d log(eps) between two runs; positive for a saddle
            that the flow approaches as eps -> 0, about zero for one it merely passes
            by, NaN where only one of the runs comes near.
    """

    loss: float
    index: int
    distance: float
    time: float
    exponent: float


def approaches(
    large: Sequence[VisitedPoint],
    small: Sequence[VisitedPoint],
    scales: tuple[float, float],
    same_loss: float = 1e-7,
) -> list[Approach]:
    """Match the saddles near two runs by their loss; in order of falling loss.

    Args:
        large, small: critical points visited from the larger and the smaller eps.
        scales: these two eps.
    """
    found = []
    for here, there in ((small, large), (large, small)):
        for visit in here:
            if not visit.index:
                continue
            twin = next(
                (v for v in there if v.index and abs(v.loss - visit.loss) <= same_loss),
                None,
            )
            if here is large and twin is not None:
                continue  # Already matched from the other side.
            exponent = math.nan
            if twin is not None:
                ratio = math.log(twin.distance / visit.distance)
                exponent = ratio / math.log(scales[0] / scales[1])
            found.append(
                Approach(
                    loss=float(visit.loss),
                    index=visit.index,
                    distance=visit.distance,
                    time=visit.time,
                    exponent=exponent,
                )
            )
    return sorted(found, key=lambda approach: -approach.loss)


def plateau_claims(
    loss: PopulationLoss,
    run: Trajectory,
    found: Sequence[Approach],
    scales: tuple[float, float],
    least_exponent: float = 0.1,
) -> list[Claim]:
    """The saddles approached as eps -> 0 lie where theory says; there are no others.

    Being near a saddle is not enough: a run from any eps may pass by one that it does
    not approach. The distance to a saddle that the flow visits falls like a power of
    eps, so the exponent decides.

    Args:
        run: a run that has reached the end of the cycle.
        found: saddles near two runs, see `approaches`.
        scales: the two eps.
        least_exponent: a saddle is approached when its exponent is at least this.
    """
    chain = loss.chain
    levels = theory.plateaus(chain)
    predicted = [
        ("log d, the origin", float(levels.origin), "stage I"),
        ("H(pi), theta_c^1", float(levels.second), "stage II"),
    ]
    for rank in range(1, chain.num_states - 1):
        best = theory.best_rank_loss(chain, rank)
        # A number that is not vouched for must not pass as a prediction.
        vouched = bool(best.outcome == RankOutcome.converged)
        value = float(best.loss) if vouched else math.nan
        predicted.append((f"L_{rank}, best logits of rank {rank}", value, "stage IV"))
    saddles = [point for point in found if point.exponent >= least_exponent]
    passed = [point for point in found if point not in saddles]
    between = f"eps = {scales[0]:.0e} and {scales[1]:.0e}"
    note = f"saddles whose distance falls with an exponent of {least_exponent:g} or "
    note += f"more between {between}: {_listed(saddles)}"
    if passed:
        note += f"; passed by, not approached: {_listed(passed)}"
    claims = [
        compare(
            "cycle: number of saddles approached is d",
            _CYCLE,
            chain.num_states,
            len(saddles),
            0.0,
            note,
        )
    ]
    for name, value, theorem in predicted:
        nearest = min(saddles, key=lambda p: abs(p.loss - value), default=None)
        claims.append(
            compare(
                f"cycle: a saddle has the loss {name}",
                theorem,
                value,
                math.nan if nearest is None else nearest.loss,
                1e-6,
                "no saddle approached"
                if nearest is None
                else f"index {nearest.index}, closest at t = {nearest.time:.5g} from "
                f"eps = {scales[1]:.0e}, distance {nearest.distance:.2e}; scale H(P)",
                scale=levels.floor,
            )
        )
    claims.append(
        compare(
            "cycle: the run ends at the floor H(P)",
            "entropy rate",
            levels.floor,
            run.losses[-1],
            1e-6,
            f"|grad L| = {float(run.grad_norms[-1]):.1e} at t = {float(run.ts[-1]):g}",
        )
    )
    return claims


def _listed(points: Sequence[Approach]) -> str:
    return ", ".join(
        f"{point.loss:.8f} (index {point.index}, distance {point.distance:.2g}, "
        f"exponent {point.exponent:.2f})"
        for point in points
    )


def repetition_claims(loss: PopulationLoss, stages: Stages) -> list[Claim]:
    """Focus and dilution, then a new direction, then focus and dilution again."""
    names = [stage.name for stage in stages]
    first, second = stages.named("dilution"), stages.named("second dilution")
    rank = 0 if stages[-1].changes is None else stages[-1].changes.rank[1]
    return [
        compare(
            "cycle: focus and dilution happen twice",
            _CYCLE,
            2,
            sum("dilution" in name for name in names),
            0.0,
            ", ".join(
                f"{stage.name} {stage.start:.4g} to {stage.end:.4g}" for stage in stages
            ),
        ),
        _dilution("focus, dilution: attention leaves the top token", first),
        _dilution("second focus, dilution: attention leaves a token again", second),
        compare(
            "cycle: W0 ends with rank d - 1",
            "stage IV",
            loss.chain.num_states - 1,
            rank,
            0.0,
            "singular values above a tenth of the largest",
        ),
    ]


def _dilution(statement: str, stage: Stage | None) -> Claim:
    """The sign of the change of the attention that a dilution is about."""
    if stage is None:
        return compare(statement, "stage III", -1.0, math.nan, 0.0, "no such stage")
    seen = stage.evidence
    return compare(
        statement,
        "stage III",
        -1.0,
        np.sign(seen["lowest after peak"] - seen["peak"]),
        0.0,
        f"sign of the change; token {stage.token}: {seen['peak']:.3f} at t = "
        f"{stage.start:.5g}, {seen['lowest after peak']:.3f} by the stage's end at "
        f"{stage.end:.5g}, {seen['valley']:.3f} at {seen['time of valley']:.5g}",
    )


@eqx.filter_jit
def _squared_norms(models: AttentionModel) -> Float[Array, " t"]:
    return jax.vmap(lambda model: _trees.inner(model, model))(models)


@eqx.filter_jit
def _balances(models: AttentionModel) -> tuple[Array, Array]:
    """Change of WQ WQ^T + WK WK^T, and of W0^T W0 - W1 W1^T, over the whole run."""
    first = jax.tree.map(lambda leaf: leaf[0], models)
    last = jax.tree.map(lambda leaf: leaf[-1], models)

    def attention(model):
        return model.WQ @ model.WQ.T + model.WK @ model.WK.T

    def rest(model):
        return model.W0.T @ model.W0 - model.W1 @ model.W1.T

    changes = (part(last) - part(first) for part in (attention, rest))
    attention_change, rest_change = (jnp.linalg.norm(change) for change in changes)
    return attention_change, rest_change


@eqx.filter_jit
def _dissipated(
    loss: PopulationLoss, ts: Float[Array, " t"], models: AttentionModel
) -> Float[Array, ""]:
    """Integral of |grad L|^2 over time, to fourth order in the saved steps.

        d|grad L|^2/dt = -2 grad L . H grad L   along the flow

    gives the end corrections of the trapezoidal rule.
    """

    def rate(model):
        grad, product = linearise(loss, model)
        return _trees.inner(grad, grad), -2.0 * _trees.inner(grad, product(grad))

    values, slopes = jax.lax.map(rate, models)
    steps = jnp.diff(ts)
    means = 0.5 * (values[1:] + values[:-1])
    corrections = (slopes[:-1] - slopes[1:]) * steps / 12.0
    return jnp.sum(steps * (means + corrections))

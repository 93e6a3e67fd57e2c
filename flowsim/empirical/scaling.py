"""How fast finite contexts and finite samples approach the population limit."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from .. import _summary, _trees
from .._types import Objective, Params
from ..batches import sampled_text
from ..flow import gradient_flow
from ..loss import PopulationLoss, SampleLoss
from ..markov import MarkovChain
from ..trajectory import Trajectory


class ScalingLaw(eqx.Module):
    """Relative parameter errors against sizes, and the exponent of their power law.

    Attributes:
        sizes: context lengths s, or numbers of windows N.
        errors: |theta(t) - theta_population(t)| / |theta_population(t)|.
        exponent: slope of log error over log size, by least squares.
    """

    sizes: tuple[int, ...]
    errors: Float[np.ndarray, " sizes"]
    exponent: float

    def __str__(self) -> str:
        return _summary.aligned(
            "ScalingLaw",
            {
                **{
                    str(size): f"{error:.4g}"
                    for size, error in zip(self.sizes, self.errors, strict=True)
                },
                "exponent": f"{self.exponent:.3f}",
            },
        )


class BurstShifts(eqx.Module):
    """The flow on finite contexts against the limit, past a burst.

    Attributes:
        lengths: s.
        shifts: time of the limit's state that is closest, minus the time looked at
            (flow time); negative: the run lags.
        aligned_errors: relative distance of the parameters to that state.
        errors: relative distance at equal times.
    """

    lengths: tuple[int, ...]
    shifts: Float[np.ndarray, " sizes"]
    aligned_errors: Float[np.ndarray, " sizes"]
    errors: Float[np.ndarray, " sizes"]

    def __str__(self) -> str:
        parts = (self.shifts, self.aligned_errors, self.errors)
        return _summary.aligned(
            "BurstShifts (shift, error after aligning, error at equal times)",
            {
                str(length): f"{shift:7.2f}   {aligned:.4g}   {error:.4g}"
                for length, shift, aligned, error in zip(
                    self.lengths, *parts, strict=True
                )
            },
        )


def context_law(
    chain: MarkovChain,
    model: Params,
    *,
    t1: float,
    lengths: tuple[int, ...] = (16, 32, 64, 128, 256, 512),
    num_windows: int = 2**16,
    key: PRNGKeyArray,
) -> ScalingLaw:
    """Errors at time t1 of the flow on windows of length s, which fall like 1/s.

    The reference is the flow on the same N last tokens and targets with contexts of
    infinite length, whose token frequencies are the stationary law: a finite N moves
    both alike, by an amount that would hide the 1/s (see `sample_law`). The windows of
    all lengths are the last parts of the same sequences.
    """
    losses, endless = _contexts(chain, lengths, num_windows, key)
    limit = _end(endless, model, t1)
    errors = [relative_distance(_end(loss, model, t1), limit) for loss in losses]
    return _law(lengths, np.array(errors))


def burst_shifts(
    chain: MarkovChain,
    model: Params,
    *,
    time: float = 150.0,
    lengths: tuple[int, ...] = (16, 32, 64, 128, 256),
    num_windows: int = 2**14,
    key: PRNGKeyArray,
) -> BurstShifts:
    """How far the flow on windows of length s lags behind a burst of the limit.

    Past a burst the states at equal times are far apart, but those at aligned times
    (`aligned_error`) are less so. The reference is that of `context_law`: a run that
    lags finds its state in the reference's past.
    """
    losses, endless = _contexts(chain, lengths, num_windows, key)
    # Rows so dense that the shift is not one of the solver's steps.
    times = np.linspace(0.0, 1.2 * time, 1201)
    reference = _flow(endless, model, times[-1], save=times)
    shifts, aligned, direct = [], [], []
    for loss in losses:
        run = _flow(loss, model, time)
        shift, error = aligned_error(run, reference, time)
        there = reference.model_at(reference.nearest(time))
        shifts.append(shift)
        aligned.append(error)
        direct.append(relative_distance(run.final, there))
    return BurstShifts(
        lengths=lengths,
        shifts=np.array(shifts),
        aligned_errors=np.array(aligned),
        errors=np.array(direct),
    )


def _contexts(
    chain: MarkovChain, lengths: tuple[int, ...], num_windows: int, key: PRNGKeyArray
) -> tuple[list[SampleLoss], SampleLoss]:
    """The last parts of the same windows, and the windows of infinite length."""
    sequences = sampled_text(
        chain, key, num_windows * (max(lengths) + 1), num_streams=num_windows
    )
    losses = [windows_loss(sequences[:, -n - 1 :], chain.num_states) for n in lengths]
    # Only ratios of counts matter, so large multiples of pi are infinite contexts.
    frequencies = np.round(np.asarray(chain.stationary, float) * 2**30)
    endless = SampleLoss(
        sequences[:, -2:-1],
        sequences[:, -1],
        counts=np.tile(frequencies.astype(np.int32), (num_windows, 1)),
    )
    return losses, endless


def sample_law(
    chain: MarkovChain,
    model: Params,
    *,
    t1: float,
    nums: tuple[int, ...] = (64, 512, 4096),
    length: int = 256,
    num_samples: int = 12,
    key: PRNGKeyArray,
) -> ScalingLaw:
    """Errors of the flow on N windows at time t1; N^-1/2 when s is large.

    The error of one sample is a random number that may be small by chance: the root
    mean square over independent samples is given. Every N must divide the largest.
    """
    most = max(nums)
    if any(most % num for num in nums):
        raise ValueError(f"every entry of nums must divide the largest; got {nums}.")
    limit = _end(PopulationLoss(chain), model, t1)
    errors = np.zeros((num_samples, len(nums)))
    for row, subkey in enumerate(jax.random.split(key, num_samples)):
        sequences = np.asarray(chain.sample(subkey, most, length + 1))
        for column, num in enumerate(nums):
            # Repeated to one size, which changes no mean: one program serves all N.
            repeated = np.tile(sequences[:num], (most // num, 1))
            loss = windows_loss(repeated, chain.num_states)
            errors[row, column] = relative_distance(_end(loss, model, t1), limit)
    return _law(nums, np.sqrt(np.mean(errors**2, axis=0)))


def windows_loss(sequences: Int[np.ndarray, "N length"], vocab: int) -> SampleLoss:
    """The loss of N windows of s tokens and their targets, counted once for all."""
    windows, num = sequences[:, :-1], len(sequences)
    places = np.arange(num)[:, None] * vocab + windows
    counts = np.bincount(places.ravel(), minlength=num * vocab).reshape(num, vocab)
    return SampleLoss(windows[:, -1:], sequences[:, -1], counts=counts.astype(np.int32))


def _law(sizes: tuple[int, ...], errors: Float[np.ndarray, " sizes"]) -> ScalingLaw:
    exponent = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    return ScalingLaw(sizes=sizes, errors=errors, exponent=float(exponent))


def _end(objective: Objective, model: Params, t1: float) -> Params:
    return _flow(objective, model, t1).final


def _flow(
    objective: Objective, model: Params, t1: float, save: Any = None
) -> Trajectory:
    # Explicit, because every gradient goes over all windows and nothing is stiff yet.
    return gradient_flow(
        objective, model, t1=t1, rtol=1e-4, solver=diffrax.Tsit5(), save=save
    )


def relative_distance(model: Params, reference: Params) -> float:
    """|theta - theta_reference| / |theta_reference|."""
    difference = _trees.norm(_trees.subtract(model, reference))
    return float(difference / _trees.norm(reference))


def aligned_error(
    run: Trajectory, reference: Trajectory, time: float
) -> tuple[float, float]:
    """Shift and relative error of a run against a reference after aligning time.

    Near a burst a small error of the rates becomes a shift of time: the row of the
    reference that is closest to the run's state at `time` is compared instead of that
    of the same time.

    Returns:
        The shift (time of that row minus `time`, in the unit of the runs; positive: the
        run is ahead), and the relative distance of the parameters there.
    """
    state = run.model_at(run.nearest(time))
    distances = jax.vmap(lambda row: _trees.norm(_trees.subtract(row, state)))(
        reference.models
    )
    row = int(np.argmin(np.asarray(distances)))
    shift = float(reference.ts[row]) - float(run.ts[run.nearest(time)])
    return shift, relative_distance(state, reference.model_at(row))

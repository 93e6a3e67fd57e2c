"""Training on text held against the population flow: what `flowsim train` measures.

A `TextSetting` is a text over V tokens with the chain of its bigrams; `study_text`
trains on its windows, integrates the population flow under the same bigrams from the
same start, and compares both over the same flow time. `find_events` reads the events of
the paper off a run, `attraction` which tokens attract attention when, `excess_by_band`
in which order tokens are learnt.

Left out: drawing (`flowsim.plots`) and printing.

>>> import flowsim as fs
>>> from flowsim.empirical import sampled_setting
>>> setting = sampled_setting(fs.lazy_chain([0.7, 0.2, 0.1], lam=0.5), num_tokens=1000)
>>> setting.ids.shape, setting.source
((256, 4), 'sampled from the chain')
"""

from .controls import Control, controls
from .departure import Departure, leave_origin, leave_second_point
from .events import Events, find_events
from .learning import Band, attention_received, attraction, excess_by_band, excess_loss
from .matrices import StageTimes, same_law_chains, shuffled_rows, stage_times
from .runs import draw_start, follow_flow, train_on
from .scaling import (
    BurstShifts,
    ScalingLaw,
    aligned_error,
    burst_shifts,
    context_law,
    sample_law,
)
from .study import TextStudy, agreement, study_text
from .texts import (
    TextSetting,
    download_setting,
    find_text,
    read_setting,
    sampled_setting,
    shuffled,
)

__all__ = [
    "Band",
    "BurstShifts",
    "Control",
    "Departure",
    "Events",
    "ScalingLaw",
    "StageTimes",
    "TextSetting",
    "TextStudy",
    "agreement",
    "aligned_error",
    "attention_received",
    "attraction",
    "burst_shifts",
    "context_law",
    "controls",
    "download_setting",
    "draw_start",
    "excess_by_band",
    "excess_loss",
    "find_events",
    "find_text",
    "follow_flow",
    "leave_origin",
    "leave_second_point",
    "read_setting",
    "same_law_chains",
    "sample_law",
    "sampled_setting",
    "shuffled",
    "shuffled_rows",
    "stage_times",
    "study_text",
    "train_on",
]

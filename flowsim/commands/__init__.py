"""The commands of the command line: the options of each, and what it runs.

Options are dataclasses whose fields carry their help. What a command computes lives
below; here it is read, called, printed and handed to `flowsim.records`.
"""

from .counts import Counts, run_counts
from .cycle import Cycle, run_cycle
from .train import Train, run_train
from .unfold import Unfold, run_unfold
from .verify import Verify, run_verify

COMMANDS = {
    "cycle": (Cycle, run_cycle),
    "verify": (Verify, run_verify),
    "unfold": (Unfold, run_unfold),
    "train": (Train, run_train),
    "counts": (Counts, run_counts),
}

__all__ = ["COMMANDS"]

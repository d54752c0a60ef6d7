"""Command line: `hybridscope demo | train | probe | cap | heads | track | influence | perplexity | ruler | lm |
fit | cost | plot | doctor | bench`."""

from __future__ import annotations

import os
import sys

import tyro

from .bench.command import bench
from .commands.evaluations import lm, ruler
from .commands.measures import cap, heads, probe, track
from .commands.runs import cost, demo, doctor, plot, train
from .commands.texts import fit, influence, perplexity

COMMANDS = {
    "demo": demo, "train": train, "probe": probe, "cap": cap, "heads": heads, "track": track, "influence": influence,
    "perplexity": perplexity, "ruler": ruler, "lm": lm, "fit": fit, "cost": cost, "plot": plot,
    "doctor": doctor, "bench": bench,
}  # fmt: skip


def main(args: list[str] | None = None) -> None:
    """Run one command; a user's mistake is one line on stderr and exit status 2."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Threads that wait asleep, set before torch loads: spinning ones make a small model many times slower whenever
    # something else runs on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from . import report

    report.COMMAND = " ".join(["hybridscope", *(sys.argv[1:] if args is None else args)])
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="hybridscope", description=__doc__, args=args)
    except (ValueError, OSError, ImportError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()

"""The long run: ``python -m tests.engine.campaign --steps 1000000``."""

from __future__ import annotations

import argparse
import time

from .fuzz import campaign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=10**6, help="of the first scenario; the next ones count up")
    arguments = parser.parse_args()
    began = time.perf_counter()
    counts = campaign(arguments.seed, arguments.steps)
    print(*(f"{name:12} {value:>10,}" for name, value in sorted(counts.items())), sep="\n")
    print(f"every output right, no law broken; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()

"""Runners without a model: half the course runs on them, exact, instant and offline."""

from nanoengine.sim.slot_runner import Done, SlotRunner, expected_output

__all__ = ["Done", "SlotRunner", "expected_output"]

"""Tests of the control plane: no model, no torch."""

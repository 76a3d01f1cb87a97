"""Tests of the benchmarks: their arithmetic, and that they run. Never how fast."""

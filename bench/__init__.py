"""Benchmarks of speed, as ratios: one question per file, both sides measured in one run."""

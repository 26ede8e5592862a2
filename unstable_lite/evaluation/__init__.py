"""Evaluation without a learner: models × opponents × envs, and tournaments, of what training left on disk."""

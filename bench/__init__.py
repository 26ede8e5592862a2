"""How fast, in ratios: one question per file, both sides measured in one run."""

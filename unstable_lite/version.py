"""The version, which the build, `--version` and a run's versions.json read."""

__version__ = "0.1.0"

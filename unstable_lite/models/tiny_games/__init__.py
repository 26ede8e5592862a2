"""The embedded model for games of OpenSpiel, `builtin:tiny-games`."""

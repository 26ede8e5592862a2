"""The embedded default model, `builtin:tiny`."""

"""Adapter versions that an engine holds, with the number of requests that use each.

The rules that all engines share: a version is loaded once, never again after its unload, and stays while a request
needs it. Knows no weights and no library.
"""

from __future__ import annotations

from unstable_lite.errors import AdapterError, RequestError

BASE = 0
"""Version of the base, which has no adapter."""


class AdapterVersions:
    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._in_use = {BASE: 0}
        self._retired: set[int] = set()
        self._digests: dict[int, str] = {}

    def check_new(self, version: int) -> None:
        """Raise AdapterError if `version` cannot be loaded."""
        if version <= BASE:
            raise AdapterError(f"adapter version {version}: versions count from 1; {BASE} is the base")
        if version in self._in_use:
            raise AdapterError(f"adapter version {version} is loaded already")
        if version in self._retired:
            raise AdapterError(f"adapter version {version} was unloaded, and a version is never used twice")
        if len(self._in_use) > self._max_loras:
            loaded = ", ".join(str(known) for known in sorted(self._in_use) if known != BASE)
            raise AdapterError(
                f"adapter version {version}: all {self._max_loras} slots are taken (versions {loaded}); "
                "unload one or raise engine.max_loras"
            )

    def add(self, version: int, digest: str) -> str:
        """Count `version` as loaded; return `digest`, which is the adapter's."""
        self._in_use[version] = 0
        self._digests[version] = digest
        return digest

    def digest(self, version: int) -> str:
        """Return the digest of `version`. Raises AdapterError if it is not loaded."""
        if version not in self._digests:
            raise AdapterError(f"adapter version {version} is not loaded; {self._loaded()}")
        return self._digests[version]

    def check_unused(self, version: int) -> None:
        """Raise AdapterError if `version` is not loaded or still in use."""
        if version == BASE or version not in self._in_use:
            raise AdapterError(f"adapter version {version} is not loaded; {self._loaded()}")
        if count := self._in_use[version]:
            raise AdapterError(f"adapter version {version} has {count} unfinished requests")

    def remove(self, version: int) -> None:
        """Remove `version`. Raises AdapterError if it is not loaded or still in use."""
        self.check_unused(version)
        del self._in_use[version], self._digests[version]
        self._retired.add(version)

    def check_loaded(self, version: int) -> None:
        """Raise RequestError if `version` is not loaded; the base never replaces it."""
        if version not in self._in_use:
            raise RequestError(f"adapter version {version} is not loaded; {self._loaded()}")

    def acquire(self, version: int) -> None:
        """Count one more request that uses `version`."""
        self._in_use[version] += 1

    def release(self, version: int) -> None:
        self._in_use[version] -= 1

    def _loaded(self) -> str:
        return f"loaded: {', '.join(map(str, sorted(self._in_use)))}"

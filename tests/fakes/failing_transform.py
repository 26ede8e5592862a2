"""A user's own reward transform with a mistake in it; it loads no torch."""


class Transform:
    def __call__(self, reward: float, pid: int, env_id: str) -> float:
        return {}[pid]  # type: ignore[no-any-return]

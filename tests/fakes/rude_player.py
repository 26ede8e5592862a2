"""An opponent that a config can name as `fakes.rude_player:Rude`."""

from unstable_lite.types import Reply


class Rude:
    """An opponent whose every move is invalid."""

    def __init__(self, env_id: str, seed: int) -> None:
        pass

    async def act(self, observation: str) -> Reply:
        return Reply(action="no", text="no", prompt=observation)

"""What verl's clients call: an actor that samples from a fleet of rollwire servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.workers.rollout.replica import TokenOutput

from rollwire_client._errors import ClosedError
from rollwire_client.integrations.verl._sampling import output, sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client._fleet.fleet import Fleet
    from rollwire_client.integrations.verl._options import FleetOptions
    from rollwire_client.integrations.verl._sampling import RolloutConfig


class RolloutActor:
    """Run as a ray actor: a server to verl, and a client of rollwire's servers.

    The servers hold, resume and free by themselves at a commit. So a sequence that an update
    interrupts goes on under the new policy, and what verl does around an update is nothing here,
    except that ``resume_generation`` says that the update was committed.
    """

    def __init__(self, options: FleetOptions, config: RolloutConfig) -> None:
        self._options = options
        self._config = config
        self._fleet: Fleet | None = None
        self._sent_version: int | None = None
        self._version: int | None = None

    async def open(self) -> None:
        """Opens the fleet, until the actor ends."""
        self._fleet = await self._options.fleet().__aenter__()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,  # noqa: ARG002 - verl's
    ) -> TokenOutput:
        """Samples one sequence to its end; sequences of one ``request_id`` share a server.

        Servers that missed the last update that verl has sent get none.

        Raises:
            ValueError: A parameter, or an image, video or audio, that rollwire cannot take.
            RollwireError: See ``Fleet.generate``.
        """
        if self._fleet is None:
            raise ClosedError("the fleet is not open: call `open` before")
        for name, data in (("image", image_data), ("video", video_data), ("audio", audio_data)):
            if data is not None and len(data):
                raise ValueError(f"rollwire samples from token ids only, and got {name} data")
        how, with_logprobs = sampling(sampling_params, self._config, len(prompt_ids), request_id)
        trajectory = await self._fleet.generate(
            prompt_ids, how, session_id=request_id, min_weight_version=self._version
        )
        return TokenOutput(**output(trajectory, with_logprobs=with_logprobs))

    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """verl sends these weights to the servers now."""
        self._sent_version = global_steps
        return {}

    async def resume_generation(self) -> None:
        """The servers have committed them."""
        self._version = self._sent_version

    async def execute_checkpoint_engine(self, method: str, *_: Any, **__: Any) -> None:
        """Nothing: this actor has no part in the transfer."""

    async def nothing(self, *_: Any, **__: Any) -> None:
        """Nothing is to be done."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    abort_all_requests = start_profile = stop_profile = nothing

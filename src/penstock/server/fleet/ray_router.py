"""Routes Ray Serve's requests by our own policy: where Ray asks which replica a request goes to, `routing` is
asked.

Ray copies this module's classes, and what they name of it, to wherever a router is made, also within a
process. So all that a router shares with the server is in `routing`, which is imported there.
"""

from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from penstock.server.fleet.routing import PromptRoute, affinity_of


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's classes have no types here.
    """Ranks replicas for a request whose first argument is a PromptRoute. Any other is sent to the idlest."""

    def initialize_state(self, *, application: str) -> None:
        """Find what is known of the replicas. Ray calls it once."""
        self._affinity = affinity_of(application)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas for a request, the best first, each as a rank of its own."""
        found = {_name(replica.replica_id): replica for replica in candidate_replicas}
        return [[found[name]] for name in self._affinity.ranked(_keys(pending_request)) if name in found]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note which replicas there are."""
        self._affinity.keep(_name(replica.replica_id) for replica in replicas)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Note that a replica is gone."""
        super().on_replica_actor_died(replica_id)
        self._affinity.keep(_name(replica) for replica in self.curr_replicas)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Note that a replica has one more request."""
        super().on_send_request(replica_id)
        self._affinity.sent(_name(replica_id))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a replica has one request less."""
        super().on_request_completed(replica_id, internal_request_id)
        self._affinity.ended(_name(replica_id))

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Note that a replica will hold the blocks of a request."""
        super().on_request_routed(pending_request, replica_id, result)
        self._affinity.note(_name(replica_id), _keys(pending_request))


def _name(replica: ReplicaID) -> str:
    return str(replica.unique_id)


def _keys(request: PendingRequest | None) -> Sequence[bytes]:
    route = request.args[0] if request is not None and request.args else None
    return route.keys if isinstance(route, PromptRoute) else ()

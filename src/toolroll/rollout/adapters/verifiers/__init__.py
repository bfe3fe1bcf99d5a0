"""verifiers (v1) and prime-rl: `EndpointClient` fills `Response.tokens` from `toolroll serve`.

    config = TrainClientConfig(base_url="http://127.0.0.1:8400/v1")  # of verifiers
    register(interception_server, config)
    context = ModelContext(model="default", client=config)

Written for verifiers 0.4.0. Its own relay client leaves `Response.tokens` None, so a trainer gets
no tokens from an endpoint. This client asks the endpoint for token ids and logprobs with each
answer, and verifiers builds its trace (prime-rl's `vf.Trace`) from them.

- Forks: if a prompt does not begin with what was served before, it starts a new branch of the
  trace.
- Aborted turns and answers without token ids raise a `ProviderError`: verifiers records the failure
  and does not train on it. Rewards come from the task, not from this client.
- `TurnTokens` has no field for weight versions. They are in the endpoint's trajectories.
"""

from toolroll.rollout.adapters.verifiers.client import EndpointClient, register

__all__ = ["EndpointClient", "register"]

"""verifiers (v1) and prime-rl: `EndpointClient` fills `Response.tokens` from `toolroll serve`.

    config = TrainClientConfig(base_url="http://127.0.0.1:8400/v1")  # of verifiers
    register(interception_server, config)
    context = ModelContext(model="default", client=config)

Written for verifiers 0.4.0. The relay client of verifiers leaves `Response.tokens` None, so a
trainer gets no tokens from an endpoint. `EndpointClient` asks the endpoint for token ids and
logprobs with each answer, and verifiers builds its trace (prime-rl's `vf.Trace`) from them.

- A prompt that does not begin with the tokens of an earlier turn starts a new branch of the trace.
- Aborted turns and answers without token ids raise a `ProviderError`. verifiers records this error
  in the trace and does not train on the turn. Rewards come from the task, not from this client.
- verifiers' `TurnTokens` has no field for weight versions. The endpoint's trajectories have them.
"""

from toolroll.trainers.verifiers.client import EndpointClient, is_registered, register

__all__ = ["EndpointClient", "is_registered", "register"]

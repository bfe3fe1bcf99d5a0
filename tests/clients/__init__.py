"""Clients of other projects, which `make test-clients` plays against the endpoint.

The task of each client is one call, then two calls in the same turn, then an answer. The engine is
scripted. `play` checks that every sampled token is trained exactly once and that the client made
the calls, and compares the sequences, the forks and the overflow error with `table`.

To add a client:

1. Write `programs/NAME_agent.py` or, for Node, `programs/NAME.mjs`. It imports only its client and
   `common`, which has the address, the dialect and the task from environment variables. Give the
   client the tool `look`, and decorate a function with `run`. It returns the answer, or raises
   the client's error. If the client reports an error without raising it, raise `Reported`. A coding
   agent is started with `command` and uses its own shell instead of `look`.
2. Add a `Client` to `table`, with the exact versions of the packages and with what you expect in
   each dialect. For a coding agent, `shell` returns the replies that call its shell.
3. Run `make test-clients CLIENTS=NAME`. It prints what the tables of `docs/dialects.md` have, and
   what differs from `table`. Expect a fork only if `fork_reason` shows that the client changed its
   history.

`tests/contract/test_clients.py` plays some of the clients in `make test-all`. Their packages must
be in `tests/requirements-all-no-deps.txt`.
"""

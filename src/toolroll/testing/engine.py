"""`EmbeddedEngine`: an HTTP server with the token-level `/generate` endpoint of SGLang 0.5.23.

This is a public test double. A policy decides the text, or a small language model samples it.
Requests and responses are as in SGLang: the stop token is in `output_ids` but not in `text`, stop
strings trim the text but not the ids, aborted requests return a 200 with a partial output, and
error bodies have SGLang's form.

Invariants: the engine shares no code with this library's templates and sessions. Each logprob is
`reference_logprob(prefix, id)`, or the language model's. `log` contains every request with its
answer, so that tests can compare their own record of tokens with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import orjson
from aiohttp import ClientConnectionResetError, web

from toolroll.testing.control import control_routes
from toolroll.testing.core import EngineCore
from toolroll.testing.faults import FaultedError
from toolroll.testing.wire import (
    EngineRequest,
    RefusedError,
    json_response,
    read_generate,
    read_json,
)

_SHUTDOWN = 0.5  # seconds for running handlers when the engine closes
_BODY_LIMIT = 256 * 2**20


class EmbeddedEngine(EngineCore):
    """An engine that serves at `url` while its async context is open. Raises `OSError` if the
    address is in use.

    Example::

        engine = EmbeddedEngine(load_embedded_tokenizer(), lambda request: "Hello.")
        async with engine, Engine(EngineConfig(engine=engine.url)) as client:
            request = GenerateRequest(prompt_ids, {"max_new_tokens": 8}, "session-1")
            completion = await client.generate(request)
        engine.log[0].output_ids  # equals completion.output_ids

    Args:
        tokenizer: A fast tokenizer of `transformers`, or a `tokenizers.Tokenizer`.
        policy: A function that returns the reply to each request, or a `LanguageModel` (see
            `load_engine`). A `LanguageModel` cannot be combined with `latency`, `token_latency` or
            `split`.
        context_length: The maximum number of tokens of the prompt and the answer together.
        stop_token_ids: Default: the tokenizer's end-of-sequence token.
        latency: Seconds per request, or a function that returns them for a `PolicyRequest`.
        token_latency: Seconds per token, in addition to `latency`.
        pool: The size of the prefix cache in tokens. Default: no limit.
        split: "canonical" encodes a reply with the tokenizer. "random" also uses other token splits
            of its text, which depend only on `seed`, the routing key and `PolicyRequest.call`.
        faults: A function that returns the fault to inject into a request, or None (see
            `fault_at`).
        vocab_size: Default: the tokenizer's.
        max_running: SGLang's --max-running-requests. None means no limit.
        max_queued: SGLang's --max-queued-requests. None means no limit.
        incremental_streaming_output: If True, an event of a stream has only the new ids, logprobs
            and text, as with SGLang's --incremental-streaming-output.
        session_cache: If True, the engine says that it was started with
            --enable-session-radix-cache.
        lora_paths: The names of LoRA adapters that a request may name. All give the same answers.
        keep_log: If False, `log` stays empty, for long benchmarks.
        seed: Determines the random splits, and the samples of a language model.
        host: The address that the server listens on.
        port: The port of the server. 0 means any free port.

    Attributes:
        killed: The number of requests that would have crashed a real engine, because an id is
            outside the vocabulary.
        held: The number of requests that wait at the `hold` of their reply.
        healthy: If False, `/health` returns a 503. Tests can set it.
    """

    _runner: web.AppRunner | None = None

    # --- serving ----------------------------------------------------------------------------------

    async def __aenter__(self) -> EmbeddedEngine:
        app = web.Application(middlewares=[_errors], client_max_size=_BODY_LIMIT)
        app.add_routes([web.post("/generate", self._generate), *control_routes(self)])
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, *self.address, backlog=4096).start()
        except OSError:
            await self._runner.cleanup()
            raise
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._runner is not None:
            self.abort(every=True)
            await self._runner.cleanup()
            await self._source.aclose()

    async def kill(self) -> None:
        """Stop like a process that is killed: connections break, and the port becomes free."""
        runner, self._runner = self._runner, None
        if runner is None or runner.server is None:
            return
        for site in list(runner.sites):
            await site.stop()
        for connection in runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()
        await self._source.aclose()

    # --- /generate --------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        parsed = read_generate(await read_json(request), request.headers, self.sampler.backend)
        if parsed.stream:
            return await self._stream(request, parsed.requests[0])
        if parsed.single:
            return json_response(await self.answer(parsed.requests[0], request))
        tasks = [asyncio.ensure_future(self.answer(entry, request)) for entry in parsed.requests]
        try:
            return json_response(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _stream(
        self, request: web.Request, engine_request: EngineRequest
    ) -> web.StreamResponse:
        """Send the answer (or a refusal) as server-sent events, then `[DONE]`."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

        async def send(data: bytes) -> None:
            if not response.prepared:
                await response.prepare(request)
            await response.write(b"data: " + data + b"\n\n")

        try:
            await send(orjson.dumps(await self.answer(engine_request, request, send)))
        except RefusedError as error:
            message = (
                error.body["error"]["message"]
                if isinstance(error.body, dict) and "error" in error.body
                else str(error.body)
            )
            failure = {
                "message": message,
                "type": "invalid_request_error",
                "code": error.status,
                "retryable": False,
            }
            await send(orjson.dumps({"error": failure}))
        except ClientConnectionResetError:
            return response
        with suppress(ConnectionError):
            await send(b"[DONE]")
        return response


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Convert a refusal, or a fault that replaces the answer, to its response."""
    try:
        return await handler(request)
    except RefusedError as error:
        return error.response()
    except FaultedError as error:
        return web.Response() if error.response is None else error.response


@contextmanager
def serve_in_thread(engine: EmbeddedEngine) -> Iterator[EmbeddedEngine]:
    """Serve `engine` while the context is open, on an event loop in a separate thread.

    Any thread may read `engine.url` and `engine.log`. Do not call the engine's methods from other
    threads. Use HTTP instead (`/abort_request`). The policy is called in the engine's thread.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="embedded-engine", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result()
        try:
            yield engine
        finally:
            asyncio.run_coroutine_threadsafe(engine.__aexit__(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

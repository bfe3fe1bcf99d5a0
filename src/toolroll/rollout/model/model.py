"""`Model`: a served model, with its engine, chat template and parser, and with threads for blocking
calls of environments.

Usually all episodes of a process share one `Model`. `Model.from_args` creates it from
`RolloutArgs`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.infer import better_parser, infer_parser
from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import UnknownParserError
from toolroll.rollout.engine import (
    Admission,
    Engine,
    EngineClient,
    EngineConfig,
    Progress,
    effective_params,
    generate_resumed,
)
from toolroll.rollout.errors import TemplateError, UsageError
from toolroll.rollout.model.identity import check_identity
from toolroll.rollout.model.tokenizers import find_placeholders, load_images, load_tokenizer
from toolroll.rollout.runtime.garbage import paced_garbage
from toolroll.rollout.runtime.pacing import Turnstile
from toolroll.rollout.runtime.targets import is_target, load_target
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.settings import EngineSettings, RolloutArgs
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.applier import ChatFunction
from toolroll.rollout.types import Completion, GenerateRequest

T = TypeVar("T")


class Model:
    """A served model. Use it as an async context manager, or call `aclose` at the end.

    `max_resumes`: the maximum number of times that one turn is resumed after the engine aborted it
    (for a weight update). If the engine then aborts it again, the partial turn is returned.
    `cache_share`: see `RolloutArgs`.
    `threads`: the maximum number of concurrent blocking calls of environments and user simulators,
    usually the number of concurrent episodes.
    """

    def __init__(
        self,
        engine: EngineClient,
        template: ChatTemplate,
        parser: ToolCallParser,
        *,
        name: str = "",
        max_resumes: int = 0,
        cache_share: float = 1.0,
        threads: int = 64,
    ) -> None:
        self.engine = engine
        self.template = template
        self.parser = parser
        self.name = name
        self.placeholders = find_placeholders(template.tokenizer)
        """The ids of tokens that stand for an image, a video or audio. A turn is cut before the
        first one, because a prompt must not contain it without its image.
        """
        self.takes_images = engine.takes_images
        """False if no image may be sent, because the engine or the trainer cannot use it."""
        self.admission = Admission(engine, cache_share)
        self.turnstile = Turnstile()
        """What each turn passes before its prompt is made, and before its answer is parsed."""
        self.sampled = (0, 0)
        """The turns and the tokens that were sampled so far."""
        self._max_resumes = max_resumes
        self.args: RolloutArgs | None = None
        """The settings that were given to `from_args`. Agents without settings use them."""
        self.run_in_thread = Threads(threads).run_in_thread
        """Runs a blocking function in a thread; see `Threads.run_in_thread`."""
        self._closing = ExitStack()
        self._shared: dict[Any, Any] = {}
        self._shared_stack = AsyncExitStack()
        self._opening = asyncio.Lock()

    @classmethod
    def from_args(
        cls,
        args: RolloutArgs,
        *,
        tokenizer: Any = None,
        engine: Callable[[EngineConfig], EngineClient] = Engine,
    ) -> Model:
        """Create a model for the engine at the address in `args`.

        `tokenizer` replaces the tokenizer that `args` names. `engine` creates the engine client.
        If `args.parser` is "auto", the parser for the format that the chat template
        writes is selected. Raise `UsageError` if no parser reads this format.
        """
        if args.parser.startswith("sglang:"):
            with _parser_option():  # before the tokenizer, which takes seconds
                get_parser(args.parser)
        if tokenizer is None:
            tokenizer = load_tokenizer(args.model, trust_remote_code=args.trust_remote_code)
        template = ChatTemplate(
            tokenizer,
            chat_template=read_template(args.chat_template),
            kwargs=args.chat_template_kwargs,
            history=args.history,
            images=load_images(tokenizer, trust_remote_code=args.trust_remote_code),
        )
        check_syntax(template, args.chat_template)
        config = EngineConfig(
            engine=args.engine,
            vocab_size=len(tokenizer),
            return_routed_experts=args.return_routed_experts,
            **args.part(EngineSettings),
        )
        with _parser_option():
            source = template.renderer.template
            name = infer_parser(tokenizer, source) if args.parser == "auto" else args.parser
            parser = get_parser(name, tokenizer.get_added_vocab())
        model = cls(
            engine(config),
            template,
            parser,
            name=args.model,
            max_resumes=args.max_resumes,
            cache_share=args.cache_share,
            threads=args.concurrency,
        )
        model.args = args
        model._closing.enter_context(paced_garbage(enabled=args.pace_gc))
        return model

    @property
    def url(self) -> str:
        """The address of the engine."""
        return self.engine.url

    async def post(self, url: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Post `payload` to the engine unchanged, and return the engine's JSON. Agents that
        override `_call_llm` use this method. `generate` is faster.
        """
        return await self.engine.post(url, payload)

    async def effective_params(
        self, sampling_params: Mapping[str, Any], prompt_length: int, template: ChatTemplate
    ) -> dict[str, Any]:
        """Return the parameters to send: `sampling_params`, with the template's stop tokens and
        the placeholder tokens added as stop tokens, and with `max_new_tokens` reduced to the room
        that is left in the model's context.

        Raise `ContextOverflowError` if no room is left.
        """
        params = dict(sampling_params)
        params["stop_token_ids"] = sorted(
            {
                *(params.get("stop_token_ids") or ()),
                *template.stop_token_ids,
                *self.placeholders,
            }
        )
        return effective_params(params, prompt_length, await self.engine.model_info())

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        """Sample one turn. If the engine aborts it, resume it up to `max_resumes` times. The turn
        may have to wait (`Admission`).

        `progress` is called during the sampling, with all ids of the turn so far.
        """
        completion = await generate_resumed(
            self.admission,
            request,
            max_resumes=self._max_resumes,
            progress=progress,
            placeholders=self.placeholders,
        )
        turns, tokens = self.sampled
        self.sampled = (turns + 1, tokens + len(completion.output_ids))
        await self.turnstile.passed()
        return completion

    async def check_identity(self, *, allow_mismatch: bool = False) -> list[str]:
        """Check that the engine serves a model with this tokenizer, and that the parser can read
        the format that the chat template writes. Return warnings.

        If the tokenizers differ, raise `UsageError`, or return a warning if `allow_mismatch` is
        True. Raise `EngineError` if the engine does not answer.
        """
        warnings = await check_identity(
            self.engine, self.template, name=self.name, allow_mismatch=allow_mismatch
        )
        source = self.template.renderer.template
        better = await self.run_in_thread(
            better_parser, self.parser, self.template.tokenizer, source
        )
        if better is not None:
            warnings.append(
                f"the chat template writes tool calls that the parser {self.parser.name!r} "
                f"(--parser) cannot read, but {better!r} can: a call that the "
                "parser cannot read counts as text"
            )
        return warnings

    def open_session(self, session_id: str) -> Callable[[], int]:
        """Let the engine's cache keep the prefixes of a session, if it can. Return the function
        that ends the session there and in `admission`, and returns how many of its turns had to
        wait. It may be called more than once.
        """
        end_at_engine = self.engine.open_session(session_id)

        def end() -> int:
            end_at_engine()
            return self.admission.end(session_id)

        return end

    async def shared(self, key: Any, make: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """Return what `make()` opens, which all episodes share. Only the first call with this `key`
        opens it. `aclose` closes it.
        """
        async with self._opening:
            if key not in self._shared:
                self._shared[key] = await self._shared_stack.enter_async_context(make())
            opened: T = self._shared[key]
            return opened

    async def aclose(self) -> None:
        """Close what is shared and the engine's connections, and release everything else."""
        try:
            await self._shared_stack.aclose()
            self._shared.clear()
            await self.engine.aclose()
        finally:
            self.release()

    def release(self) -> None:
        """Release everything except the engine. Use this instead of `aclose` if other code owns the
        engine and closes it.
        """
        self._closing.close()

    async def __aenter__(self) -> Model:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def check_syntax(template: ChatTemplate, value: str | None) -> None:
    """Raise `UsageError` with the line number if the source of `template` is not valid Jinja.

    `value`: the file or Jinja text, as in `read_template`, or None for the tokenizer's own
    template.
    """
    try:
        template.renderer.render([{"role": "user", "content": "Hello."}], None, generate=True)
    except TemplateError as error:  # a valid template may refuse this conversation too
        if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
            source = (
                "the tokenizer's own"
                if value is None
                else "the given Jinja text"
                if "{%" in value or "{{" in value
                else value
            )
            problem = error.__cause__
            raise UsageError(
                f"the chat template ({source}) is not valid Jinja: line {problem.lineno}: "
                f"{problem.message}"
            ) from error


def read_template(value: str | None) -> str | ChatFunction | None:
    """Return the chat template that `value` specifies, as the path of a file, as Jinja text, or as
    a function that renders: FILE.py:NAME or MODULE:NAME.

    Raise `UsageError` if it is none of these.
    """
    if value is None or "{%" in value or "{{" in value:
        return value
    path = Path(value)
    if path.is_file() and path.suffix != ".py":
        return path.read_text(encoding="utf-8")
    if is_target(value):
        function: ChatFunction = load_target(value)[0]
        if not callable(function):
            raise UsageError(f"the chat template {value} is no function, but {function!r:.100}")
        return function
    raise UsageError(
        f"the chat template {value!r} is neither a file nor Jinja text nor FILE.py:NAME"
    )


@contextmanager
def _parser_option() -> Iterator[None]:
    """Let an `UnknownParserError` name the setting."""
    try:
        yield
    except UnknownParserError as error:
        raise UsageError(f"parser (--parser): {error}") from error

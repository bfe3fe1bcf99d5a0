"""The process of `VerifierPool`: verifies the sequences that it receives.

Its standard input is a socket. A request is a pickle, and an answer is one byte. The process ends
when the socket is closed. It never imports the user's main module, or any module outside the
standard library and `_PACKAGES`. So code of the user runs only in the user's process.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import signal
import socket
import sys
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from toolroll.rollout.template.verify import Verifier

CONFIRMED, NOT_CONFIRMED = b"+", b"-"

_PACKAGES = frozenset({"numpy", "tokenizers", "toolroll", "transformers"})
_MOST_VERIFIERS = 64
_ORPHAN_LIMIT = 600
"""Seconds after which a process that hangs ends itself. By then its parent has killed it, unless
the parent was killed.
"""


class VerifierWorker:
    """Answers the requests of one `VerifierPool`. It keeps the tokenizers that it received."""

    def __init__(self) -> None:
        self._tokenizers: dict[bytes, Any] = {}
        self._verifier = lru_cache(_MOST_VERIFIERS)(
            lambda digest, options: Verifier(self._tokenizers[digest], **load(options))
        )

    def answer(self, digest: bytes, options: bytes | None, body: bytes) -> bytes:
        """Verify `body`, a pickled sequence, with the tokenizer whose state has this digest and the
        verifier's pickled `options`. An error is the answer `NOT_CONFIRMED`.

        If `options` is None, `body` is a pickled tokenizer. Confirm that its state has this digest.
        """
        try:
            if options is None:
                tokenizer = load(body)
                is_confirmed = state_digest(tokenizer) == digest
                if is_confirmed:
                    self._tokenizers[digest] = tokenizer
            else:
                is_confirmed = self._verifier(digest, options).check(load(body)) is None
        except Exception:  # noqa: BLE001 - the parent then verifies the sequence itself
            is_confirmed = False
        return CONFIRMED if is_confirmed else NOT_CONFIRMED


def state_digest(tokenizer: Any) -> bytes:
    """Return a digest of all state of `tokenizer` that `Verifier` uses."""
    state = (
        type(tokenizer),
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        sorted(tokenizer.get_added_vocab().items()),
        sorted(tokenizer.added_tokens_decoder.items()),
    )
    digest = blake2b(repr(state).encode(), digest_size=16)
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    return digest.digest()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        package = module.partition(".")[0]
        if package not in _PACKAGES and package not in sys.stdlib_module_names:
            raise pickle.UnpicklingError(f"{module} may be the user's code")
        return super().find_class(module, name)


def load(data: bytes) -> Any:
    """Unpickle `data`. Raise `UnpicklingError` instead of importing code of the user."""
    return _Unpickler(io.BytesIO(data)).load()


def main() -> None:
    """Answer requests until the socket is closed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    worker = VerifierWorker()
    with contextlib.suppress(EOFError, OSError), socket.socket(fileno=0) as channel:
        requests = channel.makefile("rb")
        while True:
            request = pickle.load(requests)
            signal.alarm(_ORPHAN_LIMIT)
            channel.sendall(worker.answer(*request))
            signal.alarm(0)

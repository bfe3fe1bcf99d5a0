"""`Metrics`: the counters of an endpoint, in Prometheus' text format.

Invariant: the values of labels come from fixed sets (methods, routes, statuses, error codes), never
from a client's input. So the number of time series is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from toolroll.endpoint.answers.result import CompletionResult

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the latency histogram, in seconds."""


class Metrics:
    """Counters of one endpoint, which start at zero."""

    def __init__(self) -> None:
        self.turns = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.sampled_tokens = 0
        self.errors: Counter[str] = Counter()
        """Refusals and failures, by code."""
        self.requests: Counter[tuple[str, str, int]] = Counter()
        """Requests, by method, route and status."""
        self._buckets: dict[str, list[int]] = {}
        self._seconds: Counter[str] = Counter()

    def count(self, result: CompletionResult) -> None:
        """Count the answers of a request."""
        usage = result.usage
        self.turns += len(result.choices)
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self.sampled_tokens += usage["completion_tokens"]

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        self.requests[method if method in _METHODS else "other", route, status] += 1
        self._seconds[route] += seconds  # type: ignore[assignment]
        counts = self._buckets.setdefault(route, [0] * (len(BUCKETS) + 1))
        counts[
            next((index for index, top in enumerate(BUCKETS) if seconds <= top), len(BUCKETS))
        ] += 1

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Return all counters and `gauges` as text. `gauges`: help text and value by name."""
        lines: list[str] = []
        for name, (help_text, value) in gauges.items():
            lines += _metric(name, "gauge", help_text, [("", value)])
        for name, help_text, value in (
            ("turns_total", "Answers that were returned.", self.turns),
            ("prompt_tokens_total", "Prompt tokens of the answers.", self.prompt_tokens),
            ("cached_tokens_total", "Prompt tokens from the prefix cache.", self.cached_tokens),
            ("sampled_tokens_total", "Sampled tokens of the answers.", self.sampled_tokens),
        ):
            lines += _metric(name, "counter", help_text, [("", value)])
        errors = [(_labels(code=code), count) for code, count in sorted(self.errors.items())]
        lines += _metric("errors_total", "counter", "Refusals and failures by code.", errors)
        requests = [
            (_labels(method=method, route=route, status=str(status)), count)
            for (method, route, status), count in sorted(self.requests.items())
        ]
        lines += _metric("http_requests_total", "counter", "Requests that have ended.", requests)
        return "\n".join([*lines, *self._histogram(), ""])

    def _histogram(self) -> Iterable[str]:
        name = "toolroll_http_request_seconds"
        yield f"# HELP {name} Time until the last byte of the answer."
        yield f"# TYPE {name} histogram"
        for route, counts in sorted(self._buckets.items()):
            total = 0
            for top, count in zip((*BUCKETS, "+Inf"), counts, strict=True):
                total += count
                yield f"{name}_bucket{_labels(route=route, le=str(top))} {total}"
            yield f"{name}_sum{_labels(route=route)} {self._seconds[route]}"
            yield f"{name}_count{_labels(route=route)} {total}"


def _metric(
    name: str, kind: str, help_text: str, values: Iterable[tuple[str, float]]
) -> Iterable[str]:
    yield f"# HELP toolroll_{name} {help_text}"
    yield f"# TYPE toolroll_{name} {kind}"
    for labels, value in values:
        yield f"toolroll_{name}{labels} {value}"


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"

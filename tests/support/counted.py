"""An encoder that counts its work."""

from collections.abc import Iterable

from toolroll.rollout.template.encode import Encoder


class CountedEncoder(Encoder):
    """Counts the ids that are decoded."""

    decoded = 0

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(ids)
        self.decoded += len(ids)
        return super().decode(ids)

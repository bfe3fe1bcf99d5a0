"""The model in training: transformers' Llama in float32, its optimizer, and their files."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from examples.learn_desk.batches import Sample, to_batch
from examples.learn_desk.learn import write_state
from examples.learn_desk.reinforce import Scored, chunks
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

CHUNK = 4096
"""The maximum number of tokens in one forward pass of the imitation."""


class RealNetwork(nn.Module):
    """The model in a folder, for `learn_desk`'s policy gradient."""

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__()
        self.llama: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.llama.to(device).train()  # it has no dropout

    def logprobs(self, ids: Tensor, where: Tensor) -> Tensor:
        """Return what `learn_desk`'s `Network.logprobs` returns. All tensors are on the CPU."""
        ids, where = ids.to(self.llama.device), where[:, 1:].to(self.llama.device)
        # Without an attention mask: the padding is on the right, so no token attends to it.
        states = self.llama.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        found = functional.log_softmax(self.llama.lm_head(states[where]), dim=-1)
        return found.gather(1, ids[:, 1:][where].unsqueeze(1)).squeeze(1).cpu()


class Learner:
    """The training of a part, in its folder. `save` writes `state.pt`. If this file exists, the
    training continues from it. Otherwise it starts from the model in the folder `start`.

    `seconds` has the time that each activity took. `tokens` counts the tokens of the sequences that
    were trained on.
    """

    def __init__(self, folder: Path, start: Path, device: str, rate: float) -> None:
        self.folder = folder
        self.step = self.tokens = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.network = RealNetwork(start, device)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=rate, betas=(0.9, 0.98))
        self._saved = time.monotonic()
        if (folder / "state.pt").exists():
            state = torch.load(folder / "state.pt", map_location=device)
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.tokens, seconds = state["counts"]
            self.seconds.update(seconds)

    @contextmanager
    def timed(self, activity: str) -> Iterator[None]:
        """Add the time of a block to `seconds`."""
        began = time.monotonic()
        yield
        self.seconds[activity] += time.monotonic() - began

    def save(self, *, after: float = 0.0) -> None:
        """Write the state, if the last one is at least `after` seconds old. If this is interrupted,
        the last one stays valid.
        """
        if time.monotonic() - self._saved < after:
            return
        with self.timed("checkpoints"):
            state = {
                "network": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "counts": (self.step, self.tokens, dict(self.seconds)),
            }
            write_state(state, self.folder / "state.pt")
        self._saved = time.monotonic()

    def imitate(self, samples: Sequence[Sample], rate: float) -> float:
        """Make one step towards the trained tokens of `samples`. Return the mean loss of these
        tokens.
        """
        with self.timed("training"):
            self.optimizer.param_groups[0]["lr"] = rate
            self.optimizer.zero_grad()
            trained, total = sum(int(sample.loss_mask.sum()) for sample in samples), 0.0
            for chunk in chunks([Scored(sample, 0.0) for sample in samples], CHUNK):
                batch = to_batch([one.sample for one in chunk])
                loss = -self.network.logprobs(batch.ids, batch.trained).sum() / trained
                loss.backward()
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self.optimizer.step()
        self.step += 1
        self.tokens += sum(len(sample.ids) for sample in samples)
        return total

    def log(self, **fields: Any) -> None:
        """Add a line to `log.jsonl`, and print it."""
        line = json.dumps(self.report() | fields)
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(line + "\n")
        print(self.folder.name, line, flush=True)

    def report(self) -> dict[str, Any]:
        """Return the steps, the time that each activity took, in seconds, and the speed."""
        seconds = {name: round(value, 1) for name, value in self.seconds.items()}
        speed = self.tokens / max(self.seconds["training"], 1e-9)
        return {"steps": self.step, "seconds": seconds, "trained_per_second": round(speed, 1)}

"""Speed and memory of a model with its attention and with its mixers, by length, and decoding by position.

Both are the same model: what takes the other's place is put in for a pass, so that one copy of the weights is enough.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subquad.compare.measure.costs import measure_costs
from subquad.compare.measure.lengths import Timing
from subquad.compare.measure.timing import default_dtype, in_default_dtype, interleaved_seconds, synchronizer
from subquad.decode.limits import max_text_length
from subquad.linearise.stages.batches import Batch
from subquad.linearise.stages.layers import AttentionLayers
from subquad.linearise.stages.objective import logits_of, task_loss
from subquad.models import LanguageModel
from subquad.nn.stack import StackState

BEFORE, AFTER = "attention", "mixers"
LOOKS, WARMUP = (5,), 1
"""The rounds of a measurement, and those before it."""
STEPS = 8
"""The tokens that a round of decoding writes."""


class Variant:
    """A model with its attention or with its mixers."""

    def __init__(self, model: nn.Module, layers: AttentionLayers, name: str) -> None:
        """The attention is in its place, and is there again after each pass."""
        self.module, self.layers, self.name = model, layers, name

    @contextmanager
    def in_place(self) -> Iterator[nn.Module]:
        training = self.module.training
        if self.name == BEFORE:
            yield self.module
            return
        with self.layers.replaced():
            yield self.module.train(training)  # what was outside of the model has not followed it


class VariantPasses(Variant):
    """Inference and training on one batch; see `compare.measure.costs.Passes`."""

    shapes: Mapping[str, torch.Size] = {}

    def __init__(self, model: nn.Module, layers: AttentionLayers, name: str, batch: Batch) -> None:
        super().__init__(model, layers, name)
        self.device = next(model.parameters()).device
        self.batch = batch.to(self.device)
        if "input_ids" in batch.inputs:
            check_length(model, batch.inputs["input_ids"].shape[1])

    def check(self) -> dict[str, Any]:
        """That results are finite is checked when memory is watched; what mixers compute, by their own tests."""
        return {}

    def inference(self) -> dict[str, Tensor]:
        with torch.no_grad(), in_default_dtype(self.device), self.in_place() as model:
            return {"logits": logits_of(model, self.batch)}

    def training(self) -> dict[str, Tensor]:
        with self.in_place() as model:
            with in_default_dtype(self.device):
                loss = task_loss(logits_of(model, self.batch), self.batch.targets)
            learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
            gradients = torch.autograd.grad(loss, list(learned.values()), allow_unused=True)
        found = {f"gradient of {name}": g for name, g in zip(learned, gradients, strict=True) if g is not None}
        return {"loss": loss.detach(), **found}


def check_length(model: Any, length: int) -> None:
    """Refuses text that is longer than the model's table of positions."""
    most = getattr(model.config, "max_position_embeddings", None)
    if isinstance(model, LanguageModel):
        most = max_text_length(model)
    if most is not None and length > most:
        raise ValueError(f"the model has positions for {most:,} tokens")


def random_text(model: Any, length: int) -> Batch:
    """Returns one text of random tokens, each of which is followed by a target."""
    rows = torch.randint(model.config.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(0))
    targets = rows[:, 1:]
    if type(model).__name__.endswith("ForSequenceClassification"):
        targets = torch.zeros(1, dtype=torch.long)
        end = getattr(model.config, "eos_token_id", None)
        if isinstance(end, int):  # BART reads the class off the end of a text
            rows = torch.where(rows == end, (end + 1) % model.config.vocab_size, rows)
            rows[:, -2] = end
    return Batch({"input_ids": rows[:, :-1]}, targets)


def measure_lengths(
    model: nn.Module, layers: AttentionLayers, batches: Mapping[int, Batch], report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measures both variants side by side on a batch of each length. The attention has to be in its place.

    Returns a row for each length and variant, with milliseconds and bytes of a forward pass and of a training pass. On
    a GPU both are in half precision, in which attention has its fast kernel.
    """
    device = next(model.parameters()).device
    flags = {p: p.requires_grad for p in model.parameters()}
    model.requires_grad_(True)
    rows = []
    for length, batch in batches.items():
        report(f"measures {length:,} tokens")
        builders = {name: partial(VariantPasses, model, layers, name, batch) for name in (BEFORE, AFTER)}
        for name, found in measure_costs(builders, LOOKS, device).items():
            row: dict[str, Any] = {"length": length, "batch": len(batch.targets), "variant": name}
            row |= {"precision": default_dtype(device), "status": found.status, "reason": found.reason}
            for kind, peak in found.peak_bytes.items():
                row[f"{kind}_bytes"] = peak
            for kind, seconds in found.seconds.items():
                row[f"{kind}_ms"] = Timing.of(seconds).model_dump(exclude={"rounds"})
            rows.append(row)
    for parameter, flag in flags.items():
        parameter.requires_grad_(flag)
    return rows


# ---------------------------------------------------------------------- decoding


class _Decoder(Variant):
    """Writes tokens one by one, from a position on."""

    def __init__(self, model: Any, layers: AttentionLayers, name: str, position: int) -> None:
        super().__init__(model, layers, name)
        check_length(model, position + STEPS * (WARMUP + LOOKS[-1]))
        vocab = model.config.vocab if isinstance(model, LanguageModel) else model.config.vocab_size
        tokens = torch.randint(vocab, (1, position), generator=torch.Generator().manual_seed(0))
        with torch.no_grad(), self.in_place() as whole:
            self.cache = whole.init_state(1) if isinstance(whole, LanguageModel) else None
            self._read(whole, tokens.to(next(model.parameters()).device))
        if self.cache is None:
            raise ValueError("it has no streaming form")
        self.state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(self.cache))

    def _read(self, model: Any, tokens: Tensor) -> None:
        """Reads tokens (1, time) after what was read before, and chooses the next one."""
        if isinstance(model, LanguageModel):
            logits, self.cache, _ = model(tokens, state=self.cache)
        else:
            found = model(input_ids=tokens, past_key_values=self.cache, use_cache=True)
            logits, self.cache = found.logits, found.past_key_values
        self.token = logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def write(self) -> None:
        with self.in_place() as whole:
            for _ in range(STEPS):
                self._read(whole, self.token)


def state_tensors(cache: Any) -> list[Tensor]:
    """Returns what a model keeps of the tokens that it has read: keys and values of attention, states of mixers."""
    if isinstance(cache, StackState):
        return cache.tensors()
    kept = [vars(part) for layer in cache.layers for part in (layer, getattr(layer, "state", None)) if part is not None]
    return [value for parts in kept for value in parts.values() if isinstance(value, Tensor)]


def measure_decoding(
    model: nn.Module, layers: AttentionLayers, positions: Sequence[int], report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measures both variants side by side: tokens a second after so many tokens, and the bytes of the state there."""
    device, rows = next(model.parameters()).device, []
    model.eval()
    for position in positions:
        report(f"measures decoding after {position:,} tokens")
        decoders: dict[str, _Decoder] = {}
        for name in (BEFORE, AFTER):
            try:
                decoders[name] = _Decoder(model, layers, name, position)
            except ValueError as refusal:
                rows.append({"position": position, "variant": name, "status": "refused", "reason": str(refusal)})
        work = {name: decoder.write for name, decoder in decoders.items()}
        seconds = interleaved_seconds(work, list(LOOKS), warmup=WARMUP, synchronize=synchronizer(device))
        for name, times in seconds.items():
            row: dict[str, Any] = {"position": position, "variant": name, "status": "done"}
            row["tokens_per_second"] = STEPS / (Timing.of(times).median / 1000)
            rows.append(row | {"state_bytes": decoders[name].state_bytes})
    return rows

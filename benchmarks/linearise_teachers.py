"""Teachers of the study of `subquad linearise`: a Llama-style language model and a ViT, trained here from nothing."""

import gzip
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.data.builtin import load
from subquad.data.images.inputs import Standardize, image_tensor
from subquad.packages import require_torchvision

VOCABULARY, LENGTH = 2048, 1024
BATCH, RATE, WARMUP = 4, 3e-3, 60
CURVE, TRUNK, COOLDOWN, COOLDOWN_RATE = 1464, 900, 100, 1e-3
"""Updates: the first TRUNK of a cosine over CURVE, then COOLDOWN in which the rate falls to 0 in a straight line."""
TOKENS = (TRUNK + COOLDOWN) * BATCH * LENGTH
LLAMA: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
IMAGE_BATCH, EPOCHS, IMAGE_RATE = 32, 60, 1e-3
VIT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 1,
    "num_channels": 1,
    "num_labels": 10,
}
"""The tokens are the 64 pixels of a digit, and the class token."""


def train_language_model(data: Path, out: Path) -> None:
    """Trains the language model on WikiText-2 in pieces of LENGTH tokens. data: has train.txt.gz and valid.txt.gz."""
    require_torchvision()
    import transformers

    tokenizer = _train_tokenizer(data)
    lines = _read(data, "train")
    tokens = torch.tensor([token for line in tokenizer(lines)["input_ids"] for token in line])
    blocks = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **LLAMA))
    trunk = out.with_name(f"{out.name}-trunk")
    if trunk.exists():
        model = transformers.LlamaForCausalLM.from_pretrained(trunk)
    order = list(_orders(len(blocks), BATCH, CURVE))
    if not trunk.exists():
        rates = [RATE * min(1, (update + 1) / WARMUP) * _cosine(update / CURVE) for update in range(TRUNK)]
        _train(model, blocks, order[:TRUNK], rates)
        model.save_pretrained(trunk)
    rates = [COOLDOWN_RATE * min((update + 1) / 10, 1 - update / COOLDOWN) for update in range(COOLDOWN)]
    _train(model, blocks, order[TRUNK : TRUNK + COOLDOWN], rates)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _train(model: Any, blocks: Tensor, order: Sequence[Tensor], rates: Sequence[float]) -> None:
    """Makes an update of each batch, with a new optimiser."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    model.train()
    for update, (numbers, rate) in enumerate(zip(order, rates, strict=True)):
        rows = blocks[numbers]
        loss = model(rows, labels=rows, use_cache=False).loss
        _step(model, optimizer, loss, rate)
        if update % 20 == 0:
            print(f"update {update} of {len(rates)}: loss {float(loss.detach()):.4f}", flush=True)


def _train_tokenizer(data: Path) -> Any:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator(_read(data, "train"), trainer)
    end = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, **end)


def _read(data: Path, part: str) -> list[str]:
    return gzip.decompress((data / f"{part}.txt.gz").read_bytes()).decode().splitlines(keepends=True)


def train_vit(out: Path, seed: int) -> None:
    """Trains the ViT on handwritten digits, their pixels as tokens. seed: of its first weights and of the order."""
    require_torchvision()
    import transformers

    images = load("digits").train
    transform = Standardize.of(images)
    pixels = torch.stack([image_tensor(transform, "", image) for image, _ in images])
    labels = torch.from_numpy(images.labels)
    torch.manual_seed(seed)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT))
    updates = EPOCHS * len(pixels) // IMAGE_BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=IMAGE_RATE, weight_decay=0.05)
    for update, numbers in enumerate(_orders(len(pixels), IMAGE_BATCH, updates, seed)):
        loss = model(pixel_values=pixels[numbers], labels=labels[numbers]).loss
        _step(model, optimizer, loss, IMAGE_RATE * min(1, (update + 1) / WARMUP) * _cosine(update / updates))
        if update % 100 == 0:
            print(f"update {update} of {updates}: loss {float(loss.detach()):.4f}", flush=True)
    model.save_pretrained(out)


def _orders(count: int, batch: int, updates: int, seed: int = 0) -> Iterator[Tensor]:
    """The samples of each update; every epoch has another order."""
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-updates * batch // count)
    order = torch.cat([torch.randperm(count, generator=generator) for _ in range(epochs)])
    for update in range(updates):
        yield order[update * batch : (update + 1) * batch]


def _cosine(done: float) -> float:
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def _step(model: Any, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

"""Turns images (batch, channels, H, W) into tokens (batch, h w, dim) and their grid (h, w)."""

from typing import Literal

from torch import Tensor, nn

Stem = Literal["patch", "hmlp", "conv"]


class PatchEmbedding(nn.Module):
    """Turns the patches of an image into tokens. Both sides of the image must be divisible by `patch_size`."""

    def __init__(self, channels: int, dim: int, patch_size: int, stem: Stem = "patch") -> None:
        super().__init__()
        self.patch_size = patch_size
        if stem != "patch" and patch_size not in (8, 16):
            raise ValueError(
                f"stem {stem!r} needs patches of 8 or 16 pixels, not {patch_size}; stem 'patch' takes any size"
            )
        builders = {"patch": _plain, "hmlp": _hmlp, "conv": _convolutional}
        self.proj = builders[stem](channels, dim, patch_size)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        height, width = images.shape[-2:]
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(f"images of {height} x {width} pixels do not divide into patches of {self.patch_size}")
        x = self.proj(images)
        return x.flatten(2).transpose(1, 2), (x.shape[2], x.shape[3])


def _plain(channels: int, dim: int, patch_size: int) -> nn.Module:
    return nn.Conv2d(channels, dim, patch_size, stride=patch_size)


def _hmlp(channels: int, dim: int, patch_size: int) -> nn.Sequential:
    """Three convolutions whose stride is their size, so that no pixel reaches two tokens."""
    narrow, first = dim // 4, patch_size // 4
    return nn.Sequential(
        nn.Conv2d(channels, narrow, first, stride=first),
        nn.GroupNorm(1, narrow),
        nn.GELU(),
        nn.Conv2d(narrow, narrow, 2, stride=2),
        nn.GroupNorm(1, narrow),
        nn.GELU(),
        nn.Conv2d(narrow, dim, 2, stride=2),
        nn.GroupNorm(1, dim),
    )


def _convolutional(channels: int, dim: int, patch_size: int) -> nn.Sequential:
    """Three 3 x 3 convolutions of stride 2, then a convolution over patches of their output."""
    narrow, rest = dim // 4, patch_size // 8
    parts: list[nn.Module] = []
    for before, after in ((channels, narrow), (narrow, narrow), (narrow, dim)):
        parts += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(1, after), nn.ReLU()]
    return nn.Sequential(*parts, nn.Conv2d(dim, dim, rest, stride=rest))


class OverlappingPatches(nn.Module):
    """Overlapping patches as tokens, followed by a layer norm: the input of each stage of a pyramid."""

    def __init__(self, channels: int, dim: int, size: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, size, stride=stride, padding=size // 2)
        self.norm = nn.LayerNorm(dim)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = self.proj(images)
        return self.norm(x.flatten(2).transpose(1, 2)), (x.shape[2], x.shape[3])

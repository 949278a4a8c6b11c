"""In which precision a model is trained: what `train.precision` and `train.tf32` mean on a device, and float16's scale.

bfloat16 has the range of float32, so its gradients need nothing. Those of float16 vanish below 6e-8 and overflow above
65,504. Therefore the loss is multiplied by a scale before the backward pass, and the gradients are divided by it:

    an update whose gradient is not finite                is left out and not counted, and the scale is halved
    GROWTH_INTERVAL updates in a row that are all finite  double it

The scale only concerns gradients: if the loss itself is not finite, the update is left out and the scale stays. After
MAX_SKIPPED of them in a row the model has diverged, whatever the scale.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch

AUTO = "auto"
DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The precision of the forward pass under autocast; None: that of the weights."""
MEAN_SCALE = 2.0**16
"""The first scale of a mean loss, as in torch. Ours are sums, which are as many times larger as there are targets."""
GROWTH_INTERVAL = 2000
MAX_SKIPPED = 20
"""After so many halvings a mean loss that began at MEAN_SCALE is scaled by 1/16: gradients have no need of less."""


def choose_precision(given: str, device: torch.device) -> str:
    """The precision that a recipe's `train.precision` stands for: `auto` takes the best that the device is fast in."""
    if given == AUTO:
        if device.type != "cuda":
            return "float32"
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if given == "float16" and device.type == "cpu":
        warnings.warn(
            "train.precision is float16 on a CPU, which is several times slower than float32; auto takes float32 here",
            stacklevel=2,
        )
    return given


def allow_tf32(allowed: bool, device: torch.device) -> None:
    """Whether products and convolutions of float32 on a GPU may round their factors to TF32, for this process."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed


@dataclass
class LossScale:
    """The scale of a loss in float16; see the top of the file.

    finite: so many updates in a row were. in_a_row: so many of the last updates were skipped. skipped: of all updates.
    """

    scale: float
    finite: int = 0
    in_a_row: int = 0
    skipped: int = 0

    @classmethod
    def of_sum(cls, targets: float) -> "LossScale":
        """The scale to begin with, for losses that are sums over about so many targets. It is a power of 2."""
        return cls(MEAN_SCALE / 2 ** round(math.log2(max(1.0, targets))))

    def update(self, loss: float, norm: float) -> bool:
        """Learns the loss and the norm of the gradient of an update; returns whether it is to be skipped."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.finite, self.in_a_row = self.finite + 1, 0
            if self.finite == GROWTH_INTERVAL:
                self.scale, self.finite = 2 * self.scale, 0
            return False
        if math.isfinite(loss):
            self.scale /= 2
        self.finite, self.in_a_row, self.skipped = 0, self.in_a_row + 1, self.skipped + 1
        return True

    @property
    def diverged(self) -> bool:
        return self.in_a_row >= MAX_SKIPPED

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "finite": self.finite, "in_a_row": self.in_a_row, "skipped": self.skipped}

    def restore(self, saved: Mapping[str, float]) -> None:
        self.scale = saved["scale"]
        self.finite, self.in_a_row, self.skipped = (int(saved[name]) for name in ("finite", "in_a_row", "skipped"))

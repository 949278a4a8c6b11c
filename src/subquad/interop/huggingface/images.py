"""Image classifiers in the format of Hugging Face, and the processor that turns images into tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BaseImageProcessor, BatchFeature
from transformers.modeling_outputs import ImageClassifierOutput

from subquad.data.images.arrays import channels_first
from subquad.data.images.inputs import image_tensor, transform_from
from subquad.interop.huggingface.base import SubquadModel, build_output
from subquad.models import Pyramid, VisionTransformer
from subquad.tasks.losses import class_loss


class SubquadForImageClassification(SubquadModel):
    """images (batch, channels, H, W) -> logits (batch, classes)."""

    main_input_name = "pixel_values"
    kinds = ("vision", "pyramid")
    model: VisionTransformer | Pyramid
    usage = """```python
import subquad.interop.huggingface  # makes the model known
from transformers import pipeline

pipeline("image-classification", "FOLDER")("image.png")
```"""

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> ImageClassifierOutput | tuple[Any, ...]:
        """labels: (batch,) class numbers, or (batch, classes) probabilities."""
        logits, _, aux = self.model(pixel_values)
        loss = self.mean_loss(class_loss(logits, labels), aux, num_items_in_batch) if labels is not None else None
        return build_output(ImageClassifierOutput, return_dict, loss=loss, logits=logits)


class SubquadImageProcessor(BaseImageProcessor):
    """Applies the transform of evaluation that the inputs.json of a run describes."""

    model_input_names = ["pixel_values"]  # noqa: RUF012 - the base class has it so

    def __init__(self, transform: Mapping[str, Any] | None = None, **common: Any) -> None:
        """transform: the description of a transform, as in inputs.json."""
        super().__init__(**common)
        self.transform = dict(transform or {})

    def preprocess(self, images: Any, return_tensors: str | None = None) -> BatchFeature:
        """images: one or several images of Pillow, or arrays (H, W), (H, W, C) or (C, H, W)."""
        if not self.transform:
            raise ValueError("this image processor has no transform; load it with from_pretrained")
        several = isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 4
        transform = transform_from(self.transform)
        tensors = [image_tensor(transform, "the image", _to_rgb(image)) for image in (images if several else [images])]
        return BatchFeature({"pixel_values": torch.stack(tensors)}, tensor_type=return_tensors)


def _to_rgb(image: Any) -> Any:
    """Returns an RGB image of Pillow, or an array (C, H, W)."""
    if isinstance(image, Tensor):
        image = image.numpy(force=True)
    if isinstance(image, np.ndarray):
        return channels_first(image[None], "the image")[0]
    return image.convert("RGB")

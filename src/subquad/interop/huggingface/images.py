"""Image classifiers in the format of Hugging Face, and the processor that turns images into tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import BaseImageProcessor, BatchFeature
from transformers.modeling_outputs import ImageClassifierOutput

from subquad.data.images.arrays import channels_first
from subquad.data.images.inputs import InputTransform, Standardize, image_tensor, transform_from
from subquad.interop.huggingface.arguments import record_hidden_states
from subquad.interop.huggingface.base import SubquadModel
from subquad.interop.remote_code import STUB, InstalledClass, write_stub
from subquad.models import Pyramid, VisionTransformer


class SubquadForImageClassification(SubquadModel):
    """images (batch, channels, H, W) -> logits (batch, classes)."""

    main_input_name = "pixel_values"
    kinds = ("vision", "pyramid")
    model: VisionTransformer | Pyramid
    usage = """```python
from transformers import pipeline

# trust_remote_code=True is not needed after `import subquad.interop.huggingface`
pipe = pipeline("image-classification", "FOLDER", trust_remote_code=True)
print(pipe("image.png"))
```"""

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,  # noqa: ARG002 - no mechanism gives any
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> ImageClassifierOutput | tuple[Any, ...]:
        """labels: (batch,) class numbers, or (batch, classes) probabilities.

        Hidden states are (batch, H * W, dim); those of a pyramid are its stages' one after the other.
        """
        records = self.records_hidden_states(output_hidden_states)
        with record_hidden_states(self.model, records) as hidden:
            logits, _, aux = self.model(pixel_values)
        return self.build_output(
            ImageClassifierOutput,
            return_dict,
            loss=self.class_loss(logits, labels, aux, num_items_in_batch),
            logits=logits,
            hidden_states=tuple(state for states in hidden.values() for state in states) if records else None,
        )


class SubquadImageProcessor(InstalledClass, BaseImageProcessor):
    """Applies the transform of evaluation that the inputs.json of a run describes.

    Images of another size than the model's are resized: by the transform if it says how, as that of photographs does,
    and otherwise to height and width of the training images.
    """

    model_input_names = ["pixel_values"]  # noqa: RUF012 - the base class has it so

    def __init__(self, transform: Mapping[str, Any] | None = None, do_resize: bool = True, **common: Any) -> None:
        """transform: the description of a transform, as in inputs.json. do_resize: whether images are resized if the
        transform does not do it; otherwise those of another size are refused."""
        common["auto_map"] = {"AutoImageProcessor": f"{STUB}.{type(self).__name__}"}
        super().__init__(**common)
        self.transform, self.do_resize = dict(transform or {}), do_resize

    @property
    def size(self) -> dict[str, int]:
        """Height and width of the images that the model reads."""
        _, height, width = self._input_transform().shape
        return {"height": height, "width": width}

    @property
    def image_mean(self) -> list[float]:
        return self._input_transform().mean.flatten().tolist()

    @property
    def image_std(self) -> list[float]:
        return self._input_transform().std.flatten().tolist()

    def _input_transform(self) -> InputTransform:
        if not self.transform:
            raise ValueError("this image processor has no transform; load it with from_pretrained")
        return transform_from(self.transform)

    def save_pretrained(self, save_directory: Any, *inputs: Any, **options: Any) -> Any:
        """Saves the processor as the base class does, with what lets transformers find our classes."""
        saved = super().save_pretrained(save_directory, *inputs, **options)
        write_stub(save_directory)
        return saved

    def preprocess(self, images: Any, do_resize: bool | None = None, return_tensors: str | None = None) -> BatchFeature:
        """images: one or several images of Pillow, or arrays (H, W), (H, W, C) or (C, H, W)."""
        several = isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 4
        transform = self._input_transform()
        resizes = self.do_resize if do_resize is None else do_resize
        tensors = []
        for given in images if several else [images]:
            image = _to_rgb(given)
            if resizes and isinstance(transform, Standardize):
                image = _resize(image, transform.shape)
            tensors.append(image_tensor(transform, "the image", image))
        return BatchFeature({"pixel_values": torch.stack(tensors)}, tensor_type=return_tensors)


def _to_rgb(image: Any) -> Any:
    """Returns an RGB image of Pillow, or an array (C, H, W)."""
    if isinstance(image, Tensor):
        image = image.numpy(force=True)
    if isinstance(image, np.ndarray):
        return channels_first(image[None], "the image")[0]
    return image.convert("RGB")


def _resize(image: Any, shape: tuple[int, ...]) -> Any:
    """Returns an image of Pillow or an array (C, H, W) with height and width of `shape` (C, H, W).

    Bicubic interpolation averages over all pixels that a smaller image stands for, as in the transform of photographs.
    """
    channels, height, width = shape
    if not isinstance(image, np.ndarray):
        image = np.atleast_3d(np.asarray(image.convert("L") if channels == 1 else image)).transpose(2, 0, 1)
    if image.shape[1:] == (height, width):
        return image
    pixels = torch.from_numpy(np.array(image, np.float32))[None]
    pixels = interpolate(pixels, (height, width), mode="bicubic", antialias=True)[0]
    if image.dtype != np.uint8:
        return pixels.numpy()
    return pixels.round().clamp(0, 255).to(torch.uint8).numpy()

"""Buffers that mixers compute from their options and do not store."""

import torch
from torch import nn

from subquad.mixers import Mixer


def restore_constants(model: nn.Module) -> None:
    """Restores these buffers in all mixers of a model: `from_pretrained` of transformers leaves them undefined."""
    for mixer in [module for module in model.modules() if isinstance(module, Mixer)]:
        stored = mixer.state_dict().keys()
        constants = {name: value for name, value in mixer.named_buffers() if name not in stored}
        if constants:
            with torch.random.fork_rng(devices=[]):  # building a mixer draws random weights
                fresh = dict(type(mixer)(mixer.config).named_buffers())
            for name, value in constants.items():
                value.copy_(fresh[name])

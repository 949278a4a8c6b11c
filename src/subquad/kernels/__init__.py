"""The inner loops of the mixers, as pure functions of tensors."""

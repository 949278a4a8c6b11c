"""What tests of kernels share."""

import torch


class poisoned_memory:  # noqa: N801
    """Within the block, memory that torch.empty gives holds NaN: whatever a kernel forgets to write shows."""

    def __enter__(self) -> None:
        self.before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        assert torch.empty(3).isnan().all()

    def __exit__(self, *error: object) -> None:
        torch.use_deterministic_algorithms(self.before)

"""fairseq's batches and collated pairs against ours."""

from typing import Any

import numpy as np

from subquad.data.batches import BatchPlan, Budget, batches_by_tokens, collate_pairs

PAD, EOS = 1, 2


def check_batching(content: dict[str, Any]) -> None:
    """The original's batches come first, and what it drops (a last batch of no full multiple) comes after them."""
    assert content["cases"]
    for case in content["cases"]:
        budget = Budget(
            max_tokens=case["max_tokens"],
            max_sentences=case["max_sentences"],
            multiple=case["required_batch_size_multiple"],
        )
        plan = BatchPlan(case["src_sizes"], case["tgt_sizes"], budget=budget, shuffle=False)
        assert plan.order().tolist() == case["ordered_indices"]
        ours = [batch.tolist() for batch in batches_by_tokens(plan.order(), plan.sizes, budget)]
        assert [batch.tolist() for batch in plan.epoch(0)] == ours
        golden = case["batches"]
        assert ours[: len(golden)] == golden
        rest = [sample for batch in ours[len(golden) :] for sample in batch]
        kept = sum(map(len, golden))
        assert rest == case["ordered_indices"][kept:]
        assert len(rest) == case["n_dropped"]
        assert len(ours) <= len(golden) + 1


def check_collate(content: dict[str, Any]) -> None:
    """Rows without their padding: the original pads sources on the left and sorts rows by length, ours does neither."""
    samples = [(sample["source"], sample["target"]) for sample in content["samples"]]
    assert all(source[-1] == target[-1] == EOS for source, target in samples)
    ours = collate_pairs([(source[:-1], target[:-1]) for source, target in samples], PAD, EOS)
    lengths = [len(target) for _, target in samples]
    assert sum(lengths) == content["ntokens"]
    assert len(content["id"]) == len(samples)
    for row, sample in enumerate(content["id"]):
        source = ours["source"][sample][~ours["source_padding"][sample]].tolist()
        read, predicted = ours["target_in"][sample], ours["target_out"][sample]
        end = lengths[sample]
        assert source == _tokens(content["src_tokens"][row])
        assert len(source) == content["src_lengths"][row]
        assert read[:end].tolist() == _tokens(content["prev_output_tokens"][row])
        assert predicted[:end].tolist() == _tokens(content["target"][row])
        assert (read[end:] == PAD).all()
        assert (predicted[end:] == PAD).all()


def _tokens(row: list[int]) -> list[int]:
    tokens = np.array(row)
    return tokens[tokens != PAD].tolist()

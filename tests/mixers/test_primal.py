"""Primal attention beyond what every mechanism is tested for: sampling, feature map, regulariser."""

import pytest
import torch

from subquad.mixers import Layout
from subquad.mixers.primal import Primal, sample_positions
from tests.originals.files import assert_close


def lively(**options):
    """A mixer none of whose parameters is zero or tiny."""
    mixer = Primal(**{"dim": 16, "heads": 4, "rank": 3, "rank_multiple": 2, **options})
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer


def test_positions_are_those_of_linspace() -> None:
    lengths = torch.arange(1, 400)
    for count in (*range(1, 60), 97, 128, 300, 511):
        ours = sample_positions(lengths, count)
        theirs = torch.stack([torch.linspace(0, n - 1, count, dtype=torch.int64) for n in lengths.tolist()])
        assert torch.equal(ours, theirs), count


@pytest.mark.parametrize("causal", [False, True])
def test_heads_start_orthonormal_to_each_other(causal: bool) -> None:
    mixer = Primal(dim=16, heads=4, causal=causal)
    for weight in (mixer.we, mixer.wr):
        flat = weight.detach().flatten(1)
        assert_close(flat @ flat.T, torch.eye(4), 1e-5, "products of heads")


def test_weights_follow_the_form() -> None:
    assert Primal(dim=16, heads=4, rank=3, causal=True).we.shape == (4, 4, 3)
    assert Primal(dim=16, heads=4, rank=3, rank_multiple=5).we.shape == (4, 15, 3)
    assert Primal(dim=16, heads=4, rank=3, rank_multiple=5, max_length=9).we.shape == (4, 9, 3)


def test_rank_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="primal: rank"):
        Primal(dim=16, heads=4, rank=0)


def test_causal_scores_ignore_the_size_of_the_input() -> None:
    mixer = lively(causal=True, qk_bias=False)
    x = torch.randn(2, 9, 16)
    assert_close(mixer(50 * x).y, mixer(x).y, 1e-5, "output for a scaled input")


def test_sampled_scores_grow_with_the_samples_only() -> None:
    mixer = lively(qk_bias=False)
    x = torch.randn(2, 9, 16)
    once, twice = mixer.scores(x, Layout()), mixer.scores(2 * x, Layout())
    assert_close(twice.e, 2 * once.e, 1e-5, "scores of a scaled input")


def test_causal_is_the_mean_of_the_past() -> None:
    mixer = lively(causal=True)
    x = torch.randn(1, 9, 16)
    queries = mixer.qk(x)[..., :16].unflatten(-1, (4, 4)).transpose(1, 2)
    mean = queries[:, :, :6].mean(2)
    expected = torch.einsum("bhd,hds->bhs", mean / mean.norm(dim=-1, keepdim=True), mixer.we)
    assert_close(mixer.scores(x, Layout()).e[:, :, 5], expected, 1e-5, "score of the sixth token")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("trace", ["weights", "data"])
def test_the_regulariser_is_its_equation(causal: bool, trace: str) -> None:
    mixer = lively(causal=causal, trace=trace)
    x = torch.randn(3, 8, 16)
    scores = mixer.scores(x, Layout())
    expected = []
    for row in range(3):
        sides = 0.0
        for side in (scores.e, scores.r):
            sides += (mixer.lam[:, None, :] * side[row]).square().sum(-1).mean() / 2
        we, wr = (mixer.we, mixer.wr) if trace == "weights" or causal else (scores.we[row], scores.wr[row])
        traces = [torch.trace(we[head].T @ wr[head]) for head in range(4)]
        expected.append((sides - torch.stack(traces).mean()).square())
    assert_close(mixer(x).aux, torch.stack(expected), 1e-5, "regulariser")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("trace", ["weights", "data"])
def test_reductions_agree_on_one_sample_and_not_on_more(causal: bool, trace: str) -> None:
    torch.manual_seed(1)
    sample = lively(causal=causal, trace=trace)
    batch = lively(causal=causal, trace=trace, reduction="batch")
    batch.load_state_dict(sample.state_dict())
    x = torch.randn(3, 8, 16)
    assert_close(batch(x[:1]).aux, sample(x[:1]).aux, 1e-5, "one sample")
    aux = batch(x).aux
    assert aux.shape == (3,)
    assert (aux == aux[0]).all()
    # the mean of squares exceeds the square of the mean
    assert sample(x).aux.mean() > aux.mean() + 1e-4


@pytest.mark.parametrize("options", [{"causal": True}, {}, {"trace": "data"}])
def test_the_regulariser_ignores_padding(options) -> None:
    mixer = lively(**options)
    x = torch.randn(3, 8, 16)
    padding = torch.zeros(3, 8, dtype=torch.bool)
    padding[0, 5:] = padding[1, :3] = padding[2, 2:4] = True
    aux = mixer(x, padding=padding).aux
    alone = [mixer(x[row : row + 1, ~padding[row]]).aux for row in range(3)]
    assert_close(aux, torch.cat(alone), 1e-5, "regulariser with and without padding")


def test_singular_values_enter_the_regulariser_only() -> None:
    mixer = lively()
    y, _, aux = mixer(torch.randn(2, 8, 16))
    y.sum().backward(retain_graph=True)
    assert mixer.lam.grad is None
    aux.mean().backward()
    assert mixer.lam.grad is not None
    assert mixer.lam.grad.abs().max() > 0


def test_streams_bring_no_regulariser() -> None:
    mixer = lively(causal=True)
    assert mixer(torch.randn(2, 3, 16), state=mixer.init_state(2)).aux is None
    with pytest.raises(ValueError, match="causal=False"):
        lively().init_state(2)

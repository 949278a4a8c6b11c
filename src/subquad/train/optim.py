"""Optimisers, clipping, and the moving average of weights.

    adam    fairseq's Adam: m, v as usual; p -= lr wd p; p -= lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps).
            eps is added before v's bias is corrected, unlike in torch's
    adamw   torch's AdamW: p -= lr wd p; p -= lr m' / (sqrt(v') + eps) with corrected m', v'
    nag     fairseq's Nesterov momentum: p -= lr wd p; p += mu^2 c b - (1 + mu) lr g; b <- mu c b - lr g, where b holds
            steps, not gradients, and c = lr / previous lr carries it over when the rate changes
    radam   torch's RAdam with decoupled decay
    sgd     torch's SGD with momentum (Nesterov's on request); its weight decay is added to the gradient

State is saved by the names of parameters: "exp_avg.encoder.layers.0.mixer.out.weight".
"""

import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_

from subquad.config import Options, nearest
from subquad.train.distributed import ALONE, Workers, full_tensor, gather_to_first, shard_like, to_local

GROUP_STATE = ("lr_old",)
"""Numbers of a group that belong to an optimiser's state."""


class OptimConfig(Options):
    """Options of the optimiser. The learning rate is in the section `schedule`."""

    @model_validator(mode="before")
    @classmethod
    def _without_rate(cls, given: Any) -> Any:
        if isinstance(given, dict) and "lr" in given:
            raise ValueError("the learning rate is schedule.lr: optim has none")
        return given

    name: Literal["adam", "adamw", "nag", "radam", "sgd"] = Field("adam", description="The optimiser.")
    betas: tuple[float, float] = Field((0.9, 0.98), description="For adam, adamw, radam: decay of the two averages.")
    eps: float = Field(1e-8, gt=0, description="For adam, adamw and radam: this is added to the denominator.")
    momentum: float = Field(0.99, ge=0, lt=1, description="For nag and sgd: the momentum.")
    nesterov: bool = Field(False, description="For sgd: whether the momentum is Nesterov's.")
    weight_decay: float = Field(0.0, ge=0, description="The share of a weight, times the rate, that an update removes.")
    decay_vectors: bool = Field(True, description="Whether biases, norms and other 1-D tensors have weight decay too.")
    no_decay: tuple[str, ...] = Field((), description="Names of parameters without weight decay; * is anything.")
    clip: float = Field(0.0, ge=0, description="The norm that larger gradients are scaled down to; 0: never.")
    ema: float = Field(0.0, ge=0, lt=1, description="The decay of the moving average of the weights; 0: there is none.")

    def check(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}; both must be at least 0 and below 1")
        if self.nesterov and (self.name != "sgd" or self.momentum == 0):
            raise ValueError("nesterov belongs to sgd with momentum; fairseq's Nesterov is the optimiser nag")


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Builds the optimiser of a model's trainable parameters. `set_learning_rate` sets the rate of each update."""
    groups = parameter_groups(config, model)
    common: dict[str, Any] = {"lr": 0.0, "weight_decay": config.weight_decay}
    adaptive = common | {"betas": config.betas, "eps": config.eps}
    if config.name == "adam":
        return Adam(groups, **adaptive)
    if config.name == "nag":
        return Nag(groups, **common, momentum=config.momentum)
    several_at_once = all(p.device.type == "cuda" for group in groups for p in group["params"]) or None
    if config.name == "radam":
        return torch.optim.RAdam(groups, **adaptive, decoupled_weight_decay=True, foreach=several_at_once)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, **adaptive, fused=_fusible(groups))
    nesterov = config.nesterov
    return torch.optim.SGD(groups, **common, momentum=config.momentum, nesterov=nesterov, foreach=several_at_once)


def parameter_groups(config: OptimConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Splits the parameters: those without weight decay are named in `no_decay`, or 1-D if `decay_vectors` is off."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("the model has no parameter to train: all are frozen")
    for pattern in config.no_decay:
        if not fnmatch.filter(named, pattern):
            raise ValueError(f"optim.no_decay: no parameter is called {pattern!r}{nearest(pattern, named)}")
    with_decay: list[nn.Parameter] = []
    without: list[nn.Parameter] = []
    for name, parameter in named.items():
        vector = parameter.ndim <= 1 or name.endswith(".bias")
        exempt = (vector and not config.decay_vectors) or any(
            fnmatch.fnmatchcase(name, pattern) for pattern in config.no_decay
        )
        (without if exempt else with_decay).append(parameter)
    groups: list[dict[str, Any]] = [{"params": with_decay}, {"params": without, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _fusible(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether torch has one kernel for the whole update of these parameters."""
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for group in groups for p in group["params"])


class Adam(torch.optim.Optimizer):
    """fairseq's Adam through torch's fused AdamW.

    lr sqrt(1 - b2^t) / (sqrt(v) + eps) = lr / (sqrt(v / (1 - b2^t)) + eps'), eps' = eps / sqrt(1 - b2^t): the two
    differ only by an eps that changes with the step. Parameters that missed updates have a step of their own.
    """

    def __init__(self, groups: Any, **defaults: Any) -> None:
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "not supported"
        for group in self.param_groups:
            by_step: dict[float, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())  # on the CPU: reading it must not wait for a GPU
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                by_step[state["step"].item()].append(parameter)
            for step, parameters in by_step.items():
                self._update(group, parameters, step + 1)

    def _update(self, group: Mapping[str, Any], parameters: list[Tensor], step: float) -> None:
        states = [self.state[parameter] for parameter in parameters]
        torch._foreach_add_([state["step"] for state in states], 1)
        tensors = (
            [to_local(parameter) for parameter in parameters],
            [to_local(cast(Tensor, parameter.grad)) for parameter in parameters],
            [to_local(state["exp_avg"]) for state in states],
            [to_local(state["exp_avg_sq"]) for state in states],
        )
        beta1, beta2 = group["betas"]
        rule = {
            "amsgrad": False,
            "beta1": beta1,
            "beta2": beta2,
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "eps": group["eps"] / math.sqrt(1 - beta2**step),
            "maximize": False,
        }
        if _fusible([{"params": parameters}]):
            # the kernel reads a step for each parameter, beside it: they are all the same one
            torch._fused_adamw_(*tensors, [], [torch.full((), step, device=parameters[0].device)] * len(states), **rule)
        else:
            steps = [torch.full((), step - 1) for _ in states]
            adamw_(*tensors, [], steps, foreach=True, **rule)


class Nag(torch.optim.Optimizer):
    """fairseq's Nesterov momentum; see the top of the file."""

    def __init__(self, groups: Any, **defaults: Any) -> None:
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "not supported"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            buffers = [to_local(self.state[p]["momentum_buffer"]) for p in parameters]
            gradients = [to_local(p.grad) for p in parameters]
            parameters = [to_local(p) for p in parameters]
            rate, momentum = group["lr"], group["momentum"]
            before = group.get("lr_old", rate)
            carried = rate / before if before else 1.0  # after a rate of 0 the buffer is 0
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
            torch._foreach_add_(parameters, buffers, alpha=momentum * momentum * carried)
            torch._foreach_add_(parameters, gradients, alpha=-(1 + momentum) * rate)
            torch._foreach_mul_(buffers, momentum * carried)
            torch._foreach_add_(buffers, gradients, alpha=-rate)
            group["lr_old"] = rate


# ---------------------------------------------------------------------- state by name


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, workers: Workers = ALONE) -> dict[str, Tensor]:
    """Returns the state of an optimiser as tensors called "KEY.PARAMETER"; see `gather_to_first`.

    torch's own function for this makes an update, to have a state at all, where there was none yet.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    saved: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    saved[f"{key}.{name}"] = value
            for key in GROUP_STATE:
                if key in group:
                    saved[f"{key}.{name}"] = torch.tensor(group[key], dtype=torch.float64)
    return gather_to_first(saved, workers)


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Restores what `optimizer_state` returned, bit by bit. State of unknown or misshapen parameters is an error."""
    parameters = dict(model.named_parameters())
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    fresh: dict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)
    for entry, value in saved.items():
        key, _, name = entry.partition(".")
        parameter = parameters.get(name)
        if parameter is None or parameter not in group_of:
            known = nearest(name, parameters)
            raise ValueError(f"the optimiser's state has {entry!r}, but the model does not train {name!r}{known}")
        if key in GROUP_STATE:
            group_of[parameter][key] = value.item()
        else:
            fresh[parameter][key] = _placed(key, name, value, parameter, group_of[parameter])
    keys = {tuple(sorted(state)) for state in fresh.values()}
    expected = {Adam: {"exp_avg", "exp_avg_sq", "step"}, Nag: {"momentum_buffer"}}.get(type(optimizer))
    for found in keys:
        if expected is not None and set(found) != expected:
            raise ValueError(f"the state is of another optimiser than {type(optimizer).__name__}: it has {found}")
    optimizer.state.clear()
    for parameter, state in fresh.items():
        optimizer.state[parameter] = state


def _placed(key: str, name: str, value: Tensor, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    """Returns a saved tensor on the device on which the optimiser needs it."""
    if key == "step":  # fused kernels of torch's own classes want it beside the parameter, all else on the CPU
        return value.to(parameter.device if group.get("fused") else "cpu", copy=True)
    if value.shape != parameter.shape:
        raise ValueError(
            f"the optimiser's {key} of {name!r} is {tuple(value.shape)}, expected {tuple(parameter.shape)}"
        )
    return shard_like(value, parameter)


# ---------------------------------------------------------------------- gradients


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiplies all gradients: a sum over tokens becomes a mean with 1 / tokens, which may be on their device."""
    gradients = [to_local(gradient) for gradient in gradients_of(parameters)]
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype) if isinstance(factor, Tensor) else factor)


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float = 0.0) -> Tensor:
    """Scales the gradients down to the norm `limit` (0: never). Returns the norm of all of them before that.

    If that is not finite, what is then in the gradients means nothing. The CPU does not wait for the device.
    """
    parameters = list(parameters)
    gradients = gradients_of(parameters)
    if not gradients:
        return torch.zeros(())
    several_at_once = gradients[0].device.type == "cuda" or None
    norm = full_tensor(nn.utils.get_total_norm(gradients, foreach=several_at_once))
    if limit > 0:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=several_at_once)
    return norm


# ---------------------------------------------------------------------- moving average of the weights


class Ema:
    """average <- decay * average + (1 - decay) * weights, after every update; counters and such are copied."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        averages, current = [], []
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                averages.append(to_local(self.weights[name]))
                current.append(to_local(value))
            else:
                self.weights[name].copy_(value)
        torch._foreach_lerp_(averages, current, 1 - self.decay)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Within the block the model has the averaged weights, and afterwards its own again, bit by bit."""
        own = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(self.weights)
        try:
            yield
        finally:
            model.load_state_dict(own)

    def state(self, workers: Workers = ALONE) -> dict[str, Tensor]:
        return gather_to_first(self.weights, workers)

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        if saved.keys() != self.weights.keys():
            odd = sorted(saved.keys() ^ self.weights.keys())
            raise ValueError(f"the saved average is of another model: {odd[0]!r} is not in both")
        with torch.no_grad():
            for name, value in saved.items():
                self.weights[name].copy_(shard_like(value, self.weights[name]))

"""Fixtures of fairseq: its convolution modules here, whole models in fairseq_models."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.interop.checkpoints.fairseq import convolutions as fairseq
from subquad.interop.checkpoints.weight_map import ConvertedModule
from subquad.mixers import Layout, Mixer
from tests.originals.fairseq_models import check_language_model, check_translation
from tests.originals.files import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, Fixture, assert_close, assert_gradients
from tests.originals.traces import check_trace


def check(fixture: Fixture) -> None:
    name = fixture.path.stem
    if name.startswith("train_trace_"):
        check_trace(fixture)
        return
    if name.startswith("model_") and name.endswith("_grads"):
        assert fixture.path.with_name(fixture.path.name.replace("_grads", "")).exists(), "gradients without their model"
        return  # checked with the model
    if name.startswith("model_"):
        check_translation(fixture)
        return
    if name.startswith("lm_"):
        check_language_model(fixture)
        return
    if not name.startswith("module_") or "cases" not in fixture.meta:
        pytest.fail(f"unknown kind of fixture: {fixture.path}")
    cases = json.loads(fixture.meta["cases"])
    assert cases, "a fixture without cases"
    for case_name, case in cases.items():
        Case(case_name, case, fixture.under(f"{case_name}.")).check()


class Case:
    """One convolution module of the original: its options, inputs, outputs and gradients (time, batch, channel)."""

    def __init__(self, name: str, options: Mapping[str, Any], stored: Mapping[str, Tensor]) -> None:
        self.name, self.options, self.stored = name, options, stored
        params = {key.removeprefix("param."): value for key, value in stored.items() if key.startswith("param.")}
        self.entry = self.take_input_map(params)
        self.imported: ConvertedModule[Mixer] = fairseq.convert_conv(self.options, params)
        self.mixer: Any = self.imported.module.eval()
        self.x = self.leaf("x")
        self.query = self.leaf("query")

    def leaf(self, key: str) -> Tensor | None:
        if key not in self.stored:
            return None
        return self.stored[key].transpose(0, 1).contiguous().requires_grad_()

    def take_input_map(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """in_proj of the original: the first rows of weight_linear map the input, the others predict taps from it."""
        channels, taps = self.options["input_size"], self.options["num_heads"] * self.options["kernel_size"]
        weight = params.get("weight_linear.weight")
        if weight is None or weight.shape[0] != channels + taps:
            return {}
        names = [name for name in params if name.startswith("weight_linear.")]
        entry = {name: params[name][:channels].clone().requires_grad_() for name in names}
        params.update({name: params[name][channels:] for name in names})
        self.options = dict(self.options) | {"bias": "weight_linear.bias" in params}  # whatever `bias` said of the taps
        return entry

    def target(self) -> str | None:
        """Ending of the keys that hold the right result of the parallel form.

        Where K > T, causal filters of the unfolded form are cut before their softmax: only the step-by-step result,
        `out_incremental`, is then right. None: no parallel result is.
        """
        if "out" in self.stored:
            return ""
        if "out_expanded" in self.stored:
            return "_expanded"
        too_long = self.options["kernel_size"] > self.options["T"] and self.options["kind"] == "causal"
        return "_unfold" if self.options.get("incremental_equals_unfold", not too_long) else None

    def inputs(self) -> tuple[Tensor, Tensor | None]:
        """What the convolution reads, and what its taps are predicted from (None: the same)."""
        assert self.x is not None
        if not self.entry:
            return self.x, self.query
        return F.linear(self.x, self.entry["weight_linear.weight"], self.entry.get("weight_linear.bias")), self.x

    def check(self) -> None:
        u, query = self.inputs()
        y = self.mixer(u).y if query is None else self.mixer.convolve(u, Layout(), query)
        ending = self.target()
        golden = self.stored["out_incremental" if ending is None else f"out{ending}"].transpose(0, 1)
        assert_close(y, golden, OUTPUT_TOLERANCE, f"{self.name}: output")
        if self.options["kind"] == "causal":
            step_by_step = self.stored.get("out_incremental")
            self.check_stream(golden if step_by_step is None else step_by_step.transpose(0, 1))
        if ending is not None:
            y.backward(self.stored["grad_out"].transpose(0, 1))
            self.check_gradients(ending)

    def check_stream(self, golden: Tensor) -> None:
        with torch.no_grad():
            u, query = self.inputs()
            state, outputs = self.mixer.init_state(u.shape[0]), []
            for t in range(u.shape[1]):
                if query is None:
                    y, state, _ = self.mixer(u[:, t : t + 1], state=state)
                else:
                    new = torch.ones_like(state.lengths)
                    y, state = self.mixer.convolve_step(u[:, t : t + 1], new, state, query[:, t : t + 1])
                outputs.append(y)
        assert_close(torch.cat(outputs, 1), golden, OUTPUT_TOLERANCE, f"{self.name}: output step by step")

    def check_gradients(self, ending: str) -> None:
        for leaf, key in ((self.x, f"grad_x{ending}"), (self.query, f"grad_query{ending}")):
            if key in self.stored:
                assert leaf is not None
                assert leaf.grad is not None
                golden = self.stored[key].transpose(0, 1)
                assert_close(leaf.grad, golden, GRADIENT_TOLERANCE, f"{self.name}: {key}")
        prefix = f"grad{ending}."
        params = {key.removeprefix(prefix): value for key, value in self.stored.items() if key.startswith(prefix)}
        assert params, f"{self.name}: no gradients of parameters"
        for name, tensor in self.entry.items():
            assert tensor.grad is not None
            rows = tensor.shape[0]
            assert_close(tensor.grad, params[name][:rows], GRADIENT_TOLERANCE, f"{self.name}: input rows of {name}")
            params[name] = params[name][rows:]
        assert_gradients(self.imported, params)

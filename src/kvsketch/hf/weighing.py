"""Weights of the queries of a second reading: by hidden states or by a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsketch.errors import UnsupportedError
from kvsketch.hf.layer import SketchLayer
from kvsketch.hf.second_reading import Reading
from kvsketch.slots import compute_dtype


def weighed(
    kind: str | None, model: PreTrainedModel, layers: Sequence[SketchLayer], reading: Reading
) -> AbstractContextManager[None]:
    """A context in which the model reads one part, and ``reading`` gets the weights of its queries.

    Args:
        kind: "hidden": 1 over the norm of the hidden state that enters the attention module.
            "gradient": the norm of the gradient of the sum of squares of the last layer's hidden
            states by the attention module's output. None: all weights are equal.
        layers: that have attended before, so that their modules are known.

    Raises:
        UnsupportedError: a model whose layers are in no list, or whose attention hands its output
            over in an unknown form.
    """
    if kind is None:
        return nullcontext()
    return (_by_hidden if kind == "hidden" else _by_gradient)(model, layers, reading)


def _modules(layers: Sequence[SketchLayer]) -> list[nn.Module]:
    held = [None if layer.module is None else layer.module() for layer in layers]
    return [module for module in held if module is not None]


@contextmanager
def _by_hidden(
    model: PreTrainedModel, layers: Sequence[SketchLayer], reading: Reading
) -> Iterator[None]:
    weights: dict[nn.Module, Tensor] = {}
    reading.weights = weights

    def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        norm = torch.linalg.vector_norm(hidden, dim=-1, dtype=compute_dtype(hidden.dtype))
        weights[module] = 1 / norm.clamp(min=torch.finfo(norm.dtype).tiny)

    with ExitStack() as hooks:
        for module in _modules(layers):
            handle = module.register_forward_pre_hook(entered, with_kwargs=True)
            hooks.callback(handle.remove)
        yield


@contextmanager
def _by_gradient(
    model: PreTrainedModel, layers: Sequence[SketchLayer], reading: Reading
) -> Iterator[None]:
    reading.later = []
    modules = _modules(layers)
    outputs: dict[nn.Module, Tensor] = {}
    last: list[Tensor] = []

    def embedded(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_(True)  # the parameters are frozen

    def attended(module: nn.Module, args: Any, output: Any) -> None:
        outputs[module] = _tensor(output)
        outputs[module].retain_grad()

    def ended(module: nn.Module, args: Any, output: Any) -> None:
        last.append(_tensor(output))

    def hook(module: nn.Module, call: Callable[..., Any]) -> None:
        hooks.callback(module.register_forward_hook(call).remove)

    with ExitStack() as hooks:
        hooks.enter_context(torch.enable_grad())
        hooks.enter_context(_frozen(model))
        hook(model.get_input_embeddings(), embedded)
        for module in modules:
            hook(module, attended)
        hook(_last_layer(model, modules), ended)
        yield
        if reading.later:
            live = reading.later[0][1].live
            hidden = last[-1].to(compute_dtype(last[-1].dtype))
            if live is not None:
                hidden = torch.where(live.unsqueeze(-1).to(hidden.device), hidden, 0.0)
            hidden.square().sum().backward()  # type: ignore[no-untyped-call]
    weights: dict[nn.Module, Tensor] = {}
    for module, output in outputs.items():
        assert output.grad is not None
        dtype = compute_dtype(output.dtype)
        weights[module] = torch.linalg.vector_norm(output.grad, dim=-1, dtype=dtype)
    reading.weights = weights
    later, reading.later = reading.later, None
    outputs.clear()
    for layer, observed in later:
        reading.ask(layer, observed)


def _tensor(output: Any) -> Tensor:
    found = output[0] if isinstance(output, tuple) else output
    if not isinstance(found, Tensor):
        raise UnsupportedError(
            f"gradients: a module of this model returns {type(found).__name__} where hidden states "
            "are expected; use method='kvzip'"
        )
    return found


def _last_layer(model: PreTrainedModel, modules: Sequence[nn.Module]) -> nn.Module:
    """The last of the model's layers: of the list that the attention modules are in."""
    for layers in model.base_model.modules():
        if isinstance(layers, nn.ModuleList) and any(
            part is modules[-1] for layer in layers for part in layer.modules()
        ):
            return layers[-1]
    raise UnsupportedError(
        f"gradients: the layers of {type(model).__name__} are in no ModuleList; use method='kvzip'"
    )


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter takes gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)

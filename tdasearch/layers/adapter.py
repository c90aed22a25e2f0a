"""Adapters of peft. Nothing of peft is imported: its layers are recognised by what they promise.

LoRA's two maps are linear modules like others. Every other adapter (DoRA, IA3, AdaLoRA, VeRA, LoRA of an embedding) is captured
by running its layer again, example by example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from tdasearch.errors import CaptureError
from tdasearch.layers.convolution import convolution
from tdasearch.layers.layer import Layer
from tdasearch.layers.linear import linear
from tdasearch.layers.recomputed import Recomputed


def _is_tuner(module: nn.Module) -> bool:
    return hasattr(module, "adapter_layer_names") and hasattr(module, "merged_adapters") and hasattr(module, "active_adapters")


def _held(tuner: Any) -> Iterator[tuple[str, Any]]:
    """The active adapters' modules and parameters, by their names in the layer."""
    for attribute in tuner.adapter_layer_names:
        held = getattr(tuner, attribute, None)
        for adapter_name in tuner.active_adapters:
            if isinstance(held, nn.ModuleDict | nn.ParameterDict) and adapter_name in held:
                yield f"{attribute}.{adapter_name}", held[adapter_name]


def _maps(tuner: Any) -> dict[str, nn.Module]:
    """The modules of a layer whose adapters are plain LoRA: nothing but linear maps, each run once."""
    held = dict(_held(tuner))
    plain = set(tuner.adapter_layer_names) >= {"lora_A", "lora_B"} and not any(getattr(tuner, "lora_variant", {}).values())
    known = all(isinstance(one, nn.Module) and (linear("", one) or convolution("", one)) for one in held.values())
    return held if plain and known else {}


def adapter_modules(model: nn.Module) -> set[str]:
    """Name the modules that hold a model's active adapters; empty where it has none."""
    found: set[str] = set()
    for name, module in model.named_modules():
        if _is_tuner(module) and any(True for _ in _held(module)):
            maps = _maps(module)
            found.update(f"{name}.{key}" for key in maps) if maps else found.add(name)
    return found


def adapter(name: str, module: nn.Module) -> Layer | None:
    """Recognise a layer with adapters other than plain LoRA."""
    if not _is_tuner(module) or _maps(module):
        return None
    parameters: dict[str, nn.Parameter] = {}
    for key, held in _held(module):
        if isinstance(held, nn.Parameter):
            parameters[key] = held
        else:
            parameters.update({f"{key}.{inner}": parameter for inner, parameter in held.named_parameters()})
    return Recomputed(name, module, parameters) if parameters else None


def refuse_inactive(model: nn.Module, names: Sequence[str]) -> None:
    """Raise a CaptureError for adapters that do not run: merged into the weights, or disabled.

    Args:
        model: The model.
        names: Of the modules to capture; those of the base model may be captured in any case.

    Raises:
        CaptureError: One of them belongs to a merged or disabled adapter.
    """
    for name, module in model.named_modules():
        if not _is_tuner(module):
            continue
        tuner: Any = module
        state = "merged into the weights" if tuner.merged_adapters else "disabled" if tuner.disable_adapters else ""
        mine = [one for one in names if one == name or (one.startswith(name + ".") and not one.startswith(name + ".base_layer"))]
        if state and mine:
            remedy = "model.unmerge_adapter()" if tuner.merged_adapters else "model.base_model.enable_adapter_layers()"
            raise CaptureError(
                f"module {mine[0]!r}: expected an adapter that runs, found it {state}: call {remedy} first, or choose modules of "
                "the base model"
            )

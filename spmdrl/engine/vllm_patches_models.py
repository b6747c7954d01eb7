"""Patches of vLLM's models, those of its Transformers backend above all, without which no trainer
can stand beside its engines.

Serves vLLM 0.24 to 0.33. Per line: the name here, what it patches, and when it can go.

patch_models               all of those below
keep_transformers_classes  models.transformers.base.Base, support_torch_compile
                                                    once it decorates classes of its own
keep_head_bias             ParallelLMHead._register_bias   once a second loading keeps the bias
count_own_ranks            models.gpt_oss.MLPBlock         once it asks no rank but its engine's
add_phimoe_head_bias       models.phimoe.PhiMoEForCausalLM.compute_logits   once it adds the bias
"""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace
from typing import Any

from torch import nn

_ADDED = ("__init__", "__call__", "save_aot_compiled_function", "_ignore_compile_vllm")


def patch_models() -> None:
    """Apply all patches of this file; a second time changes nothing."""
    keep_transformers_classes()
    keep_head_bias()
    count_own_ranks()
    add_phimoe_head_bias()


def keep_transformers_classes() -> None:
    """Have engines of that backend hold a subclass of transformers' class instead of changing it.

    vLLM gives the class itself a base, an `__init__` and a `__call__` of its own for good. Then no
    model of that class can be built where no engine is (`Current vLLM config is not set`), and none
    that was built before can be called.
    """
    from vllm.model_executor.models.transformers import base

    if hasattr(base.Base.__init__, "__wrapped__"):
        return
    build = base.Base.__init__
    decorate = base.support_torch_compile

    @wraps(build)
    def built(self: Any, **options: Any) -> None:
        found: list[_Undecorated] = []

        def noted(**settings: Any) -> Any:
            def decorated(cls: type) -> type:
                found.append(_Undecorated(cls))
                return decorate(**settings)(cls)

            return decorated

        base.support_torch_compile = noted
        try:
            build(self, **options)
        finally:
            base.support_torch_compile = decorate
            for before in found:
                before.restore(self)
        for module in self.modules():  # vLLM traced forwards with torch.fx, which left these
            for name in [n for n in vars(module) if n.startswith("_tensor_constant")]:
                delattr(module, name)

    base.Base.__init__ = built


def keep_head_bias() -> None:
    """Have every loading of weights write the head's bias in place.

    That backend makes the bias as it loads it, and so another one in each later loading.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    register = getattr(ParallelLMHead, "_register_bias", None)
    if register is None or hasattr(register, "__wrapped__"):
        return

    @wraps(register)
    def register_once(self: Any) -> None:
        if getattr(self, "bias", None) is None:
            register(self)

    ParallelLMHead._register_bias = register_once


def count_own_ranks() -> None:
    """Have GPT-OSS's experts be divided by the ranks of their engine, not by those of the job."""
    from vllm.distributed import get_tensor_model_parallel_world_size
    from vllm.model_executor.models import gpt_oss

    gpt_oss.dist = SimpleNamespace(
        is_initialized=lambda: True, get_world_size=get_tensor_model_parallel_world_size
    )


def add_phimoe_head_bias() -> None:
    """Have PhiMoE's logits have the bias of its head, which vLLM loads and leaves out."""
    try:
        from vllm.model_executor.models.phimoe import PhiMoEForCausalLM
    except ImportError:
        return

    def compute_logits(self: Any, hidden_states: Any) -> Any:
        return self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)

    PhiMoEForCausalLM.compute_logits = compute_logits


class _Undecorated:
    """A class as it was before vLLM decorated it."""

    def __init__(self, cls: type):
        self._cls = cls
        self._bases = cls.__bases__
        self._own = {name: cls.__dict__[name] for name in _ADDED if name in cls.__dict__}

    def restore(self, model: nn.Module) -> None:
        """Make the class what it was, and modules of it in `model` ones of a decorated subclass."""
        cls = self._cls
        added: dict[str, Any] = {
            name: cls.__dict__[name] for name in _ADDED if name in cls.__dict__
        }
        own_bases = tuple(base for base in cls.__bases__ if base not in self._bases)
        for name in added:
            delattr(cls, name)
        for name, value in self._own.items():
            setattr(cls, name, value)
        cls.__bases__ = self._bases
        if not own_bases:
            return
        added.update(__module__=cls.__module__, __qualname__=cls.__qualname__)
        decorated = type(cls.__name__, (cls, *own_bases), added)
        for module in model.modules():
            if type(module) is cls:
                module.__class__ = decorated

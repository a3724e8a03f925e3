"""The annotations of model/ can be read, and are checked while the tests run."""

import importlib
import inspect
import pkgutil
import typing

import pytest
import torch
from jaxtyping import TypeCheckError

import model
from model.attention.contract import attention_function
from model.attention.masks import padding_mask

MODULES = [importlib.import_module(info.name) for info in pkgutil.walk_packages(model.__path__, "model.")]


def test_every_annotation_can_be_read():
    """One that cannot, such as a shape with two "*", is silently not checked."""
    for module in MODULES:
        classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
        for member in (member for owner in (module, *classes) for member in vars(owner).values()):
            function = member.fget if isinstance(member, property) else member
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                typing.get_type_hints(inspect.unwrap(function), include_extras=True)


def test_a_wrong_shape_is_noticed():
    @attention_function
    def too_narrow(call):
        return call.v[..., 1:]

    q = torch.randn(2, 4, 8)
    for call in (
        lambda: too_narrow(q, q, q),
        lambda: padding_mask(torch.ones(3)),
        lambda: too_narrow(q, q, q, bias=q.int()),
    ):
        with pytest.raises(TypeCheckError):
            call()

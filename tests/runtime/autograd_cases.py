"""All cases of `test_autograd_shapes`: importing a file of cases adds them."""

from __future__ import annotations

from tests.runtime import autograd_call_cases, autograd_layer_cases, autograd_parameter_cases
from tests.runtime.autograd_case import CASES

__all__ = ["CASES", "autograd_call_cases", "autograd_layer_cases", "autograd_parameter_cases"]

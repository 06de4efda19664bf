"""Policies and wrapping, under torch FSDP1's path ``fsdp.wrap``."""

from composable_fsdp.doors.wrapping import (
    _or_policy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from composable_fsdp.planning.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    Policy,
    SizePolicy,
    size_based_auto_wrap_policy,
)

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "Policy",
    "SizePolicy",
    "_or_policy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

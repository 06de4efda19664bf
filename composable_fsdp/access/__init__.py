"""Settings of the step, under the names of FSDP2's methods; and whole weights."""

from typing import TYPE_CHECKING

from composable_fsdp.lazy import public_names

if TYPE_CHECKING:
    from composable_fsdp.access.hand_over import Transfer as Transfer
    from composable_fsdp.access.hand_over import boxes as boxes
    from composable_fsdp.access.hand_over import transfer_plan as transfer_plan
    from composable_fsdp.access.manual import full_shape as full_shape
    from composable_fsdp.access.settings import (
        set_gradient_divide_factor as set_gradient_divide_factor,
    )
    from composable_fsdp.access.settings import (
        set_is_last_backward as set_is_last_backward,
    )
    from composable_fsdp.access.settings import (
        set_modules_to_backward_prefetch as set_modules_to_backward_prefetch,
    )
    from composable_fsdp.access.settings import (
        set_modules_to_forward_prefetch as set_modules_to_forward_prefetch,
    )
    from composable_fsdp.access.settings import (
        set_reduce_scatter_unused_params as set_reduce_scatter_unused_params,
    )
    from composable_fsdp.access.settings import (
        set_requires_all_reduce as set_requires_all_reduce,
    )
    from composable_fsdp.access.settings import (
        set_requires_gradient_sync as set_requires_gradient_sync,
    )
    from composable_fsdp.access.settings import (
        set_reshard_after_backward as set_reshard_after_backward,
    )
    from composable_fsdp.access.settings import (
        set_reshard_after_forward as set_reshard_after_forward,
    )
    from composable_fsdp.access.settings import (
        set_separate_reduce_scatter_group as set_separate_reduce_scatter_group,
    )
    from composable_fsdp.access.stream import StreamPlan as StreamPlan
    from composable_fsdp.access.stream import stream_full as stream_full
    from composable_fsdp.access.stream import stream_plan as stream_plan

__all__ = public_names(__name__)

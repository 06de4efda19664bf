"""Checkpoints: what ``save``, ``load`` and ``verify`` take and return, and storages."""

from typing import TYPE_CHECKING

from composable_fsdp.lazy import public_names

if TYPE_CHECKING:
    from composable_fsdp.storage.compare import LoadReport as LoadReport
    from composable_fsdp.storage.export import export_safetensors as export_safetensors
    from composable_fsdp.storage.opening import CheckpointInfo as CheckpointInfo
    from composable_fsdp.storage.opening import open_source as open_source
    from composable_fsdp.storage.opening import remove_stale as remove_stale
    from composable_fsdp.storage.save import free_save_memory as free_save_memory
    from composable_fsdp.storage.source import Source as Source
    from composable_fsdp.storage.source import TensorInfo as TensorInfo
    from composable_fsdp.storage.storages import Storage as Storage
    from composable_fsdp.storage.storages import StoredObject as StoredObject
    from composable_fsdp.storage.storages import Upload as Upload
    from composable_fsdp.storage.storages import register_storage as register_storage

__all__ = public_names(__name__)

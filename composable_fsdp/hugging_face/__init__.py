"""Names for models of transformers, and for users of accelerate and the Trainer."""

from composable_fsdp.integrations.hf_adapters import merge_adapters
from composable_fsdp.integrations.hf_config import HFSharding, from_hf_config
from composable_fsdp.integrations.hf_weights import load_pretrained, save_pretrained
from composable_fsdp.tools.models import NoSplitPolicy

__all__ = [
    "HFSharding",
    "NoSplitPolicy",
    "from_hf_config",
    "load_pretrained",
    "merge_adapters",
    "save_pretrained",
]

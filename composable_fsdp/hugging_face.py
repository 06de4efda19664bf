"""Names for models of transformers, and for users of accelerate and the Trainer."""

from composable_fsdp.integrations.hf_config import HFSharding, from_hf_config
from composable_fsdp.planning.model_units import NoSplitPolicy

__all__ = ["HFSharding", "NoSplitPolicy", "from_hf_config"]

"""Dtypes by their names in files: torch's names, and the codes of safetensors."""

from __future__ import annotations

import torch

from composable_fsdp.errors import CheckpointError

# safetensors has no code for complex128 and for quantized dtypes.
CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that a safetensors file can hold, with their codes in the header."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` without the module: ``float32``."""
    return str(dtype).removeprefix("torch.")


DTYPES: dict[str, torch.dtype] = {dtype_name(dtype): dtype for dtype in CODES}
"""The dtypes of ``CODES`` by name."""


def require_storable(dtype: torch.dtype, what: str) -> None:
    """Raise CheckpointError, naming ``what``, for a dtype that no file can hold."""
    if dtype not in CODES:
        raise CheckpointError(
            f"{what} has dtype {dtype}, which a checkpoint cannot hold; expected one "
            f"of {', '.join(sorted(DTYPES))}. Convert it before saving."
        )

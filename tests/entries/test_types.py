"""Type checkers and ``help`` see the arguments and the result of a composable API."""

from __future__ import annotations

import inspect
import pydoc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import composable_fsdp
from composable_fsdp import fully_shard, replicate

ROOT = Path(composable_fsdp.__file__).parents[1]

CONFIG = """
[mypy]
strict = True
disallow_subclassing_any = False
mypy_path = {root}
cache_dir = {cache}
[mypy-torch.*]
follow_imports = skip
"""
"""Without torch's own files, which take mypy most of a minute."""

CALLS = """
from torch import nn
from typing_extensions import reveal_type

import composable_fsdp
from composable_fsdp import CPUOffload, ShardingStrategy, fully_shard, replicate
from composable_fsdp import fsdp2


class Net(nn.Module):
    width: int = 3


net = Net()
reveal_type(fully_shard(net))  # R: Net
reveal_type(fully_shard([net, net]))  # R: list[Net]
reveal_type(fully_shard((net, net)))  # R: tuple[Net, Net]
reveal_type(fully_shard(net, strategy=ShardingStrategy.NO_SHARD).width)  # R: int
reveal_type(replicate(net, init_sync=False))  # R: Net
fully_shard(module=net, cpu_offload=CPUOffload(True), if_sharded="skip")
fully_shard(net, strategi=3)  # E: Unexpected keyword argument "strategi"
fully_shard(net, strategy="FULL_SHARD")  # E: Argument "strategy"
fully_shard(net, cpu_offload=True)  # E: Argument "cpu_offload"
fully_shard(net, None)  # E: Too many positional arguments
fully_shard()  # E: Missing positional argument "module"
fully_shard(net, reshard_after_forward=True)  # E: Unexpected keyword argument
reveal_type(fsdp2.fully_shard(net, reshard_after_forward=2))  # R: FSDPModule
fsdp2.fully_shard(net).set_requires_gradient_sync(False)
fsdp2.fully_shard(net, msh=None)  # E: Unexpected keyword argument "msh"
fsdp2.fully_shard(net, mp_policy=3)  # E: No overload variant
fsdp2.fully_shard(net).unshard(asynchronous=True)  # E: Unexpected keyword argument
replicate(net, strategy=3)  # E: Unexpected keyword argument "strategy"
replicate(net, init_sync=[])  # E: Argument "init_sync"


@composable_fsdp.contract()
def label(module: nn.Module, text: str, *, number: int = 0) -> None: ...


reveal_type(label(net, "a", number=2))  # R: Net
label(net)  # E: Missing positional argument "text"
label(net, 3)  # E: Argument 2
label(net, "a", numbr=2)  # E: Unexpected keyword argument "numbr"
"""
"""``E:`` names the error that mypy must find in a line, ``R:`` the type that mypy must
reveal there.
"""


def by_mypy(text: str, folder: Path) -> dict[int, str]:
    """Return the first message of mypy on each line of ``text`` that has a message."""
    api: Any = pytest.importorskip("mypy.api")
    (folder / "mypy.ini").write_text(CONFIG.format(root=ROOT, cache=folder / "cache"))
    (folder / "calls.py").write_text(text)
    # mypy raises the recursion limit, and later tests run in the same process.
    limit = sys.getrecursionlimit()
    try:
        found, trouble, _ = api.run(
            ["--config-file", str(folder / "mypy.ini"), str(folder / "calls.py")]
        )
    finally:
        sys.setrecursionlimit(limit)
    assert not trouble, trouble
    messages: dict[int, str] = {}
    for line, message in re.findall(r"calls\.py:(\d+): \w+: (.*)", found):
        messages.setdefault(int(line), message)
    return messages


def expected(text: str) -> dict[int, str]:
    """Return what the comments of ``text`` say that mypy must find, by line."""
    return {
        number: wanted
        for number, line in enumerate(text.splitlines(), 1)
        for wanted in re.findall(r"# (?:E|R): (.*)", line)
    }


@pytest.mark.req("N-04")
def test_mypy_knows_the_arguments_and_the_type_of_the_result(tmp_path: Path) -> None:
    """A wrong name or type is refused, and modules keep their type."""
    found = by_mypy(CALLS, tmp_path)

    wanted = expected(CALLS)
    assert found.keys() == wanted.keys()
    for line, message in found.items():
        if message.startswith("Revealed"):
            message = re.sub(r"(?:\b\w+\.)+(?=\w+\b)", "", message)
            assert message == f'Revealed type is "{wanted[line]}"'
        else:
            assert message.startswith(wanted[line])


APIS: list[Callable[..., Any]] = [fully_shard, replicate]


@pytest.mark.req("N-04")
@pytest.mark.parametrize("api", APIS, ids=["fully_shard", "replicate"])
def test_help_shows_every_argument_and_the_result(api: Callable[..., Any]) -> None:
    """As for a plain function: one signature, then the docstring."""
    signature = inspect.signature(api)
    names = list(signature.parameters)

    assert names[0] == "module"
    assert signature.return_annotation == signature.parameters["module"].annotation
    assert not any(
        each.kind is each.VAR_KEYWORD for each in signature.parameters.values()
    )
    shown = pydoc.plain(pydoc.render_doc(api))
    assert f"{api.__name__}(" in shown
    head, body = shown.split("->", 1)
    for name in names:
        assert f"{name}:" in head
        assert name in body
    assert "composable API" not in shown

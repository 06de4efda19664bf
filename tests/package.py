"""Build sdist and wheel, install beside nothing but torch, and run the quickstart.

python -m tests.package
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from tests.test_pages import blocks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "getting_started" / "quickstart.md"


ADDRESS = "https://example.org/composable_fsdp"
"""Where the repository is, for this build."""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run ``command``, print what it prints, and return that."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    origin = {"COUNT": "1", "KEY_0": "remote.origin.url", "VALUE_0": f"{ADDRESS}.git"}
    environment |= {f"GIT_CONFIG_{name}": value for name, value in origin.items()}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    sys.stdout.write(done.stdout)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: status {done.returncode}")
    return done.stdout


def main() -> None:
    """Build, install and run; end with a status other than 0 if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        dist, environment, work = (Path(folder, n) for n in ("dist", "venv", "work"))
        run(sys.executable, "-m", "build", "--outdir", dist)

        venv.create(environment, with_pip=True)
        paths = {"base": str(environment), "platbase": str(environment)}
        packages = Path(sysconfig.get_path("purelib", vars=paths))
        (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
        python = environment / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", *dist.glob("*.whl"))

        work.mkdir()
        (script,) = (each for each in blocks(PAGE) if each.script == "train.py")
        (work / "train.py").write_text(script.text)
        where = "import composable_fsdp as c; print(c.__file__)"
        assert run(python, "-c", where, cwd=work).startswith(str(environment))
        # The wheel is made of the sdist, which has no repository.
        (metadata,) = packages.glob("composable_fsdp-*.dist-info/METADATA")
        told = metadata.read_text("utf-8")
        assert f"Project-URL: Repository, {ADDRESS}\n" in told
        assert f"]({ADDRESS}/raw/main/docs/_static/host.svg)" in told
        assert not re.findall(r"\]\((?!https:)[^)]*\)", told)
        for ranks in ("2", "3"):  # the second run goes on from the checkpoint
            launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
            printed = run(python, *launch, ranks, "train.py", cwd=work)
        assert "epoch 6" in printed
        run(environment / "bin" / "composable-fsdp", "verify", "runs", cwd=work)


if __name__ == "__main__":
    main()

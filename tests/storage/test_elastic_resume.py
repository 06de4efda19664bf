"""The example of elastic training: kill -9 in a save, and other numbers of ranks.

To start Python and torch takes most of a run under torchrun, so the ranks that die, and
one further number of ranks, have only the environment of torchrun; others are rank
pools. ``tests/faults/test_signals.py`` runs the example under torchrun itself.
"""

from __future__ import annotations

import io
import re
import shutil
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from composable_fsdp import verify
from tests.faults.launch import launch
from tests.support.scripts import run_script
from tests.support.sharded import RankCount
from tests.support.world import World

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_resume.py"
STEPS, BROKEN_AT = 6, 4
LOSS = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)


def asked(folder: Path) -> tuple[str, ...]:
    """Arguments of the example."""
    return "--folder", str(folder), "--steps", str(STEPS), "--save-every", "2"


def losses_in(text: str) -> dict[int, float]:
    """Losses by step, of what was printed."""
    return {int(step): float(loss) for step, loss in LOSS.findall(text)}


def run_example(world: World, folder: Path) -> str:
    """What the example prints on this rank."""
    sys.path.insert(0, str(EXAMPLE.parent))
    import elastic_resume
    import lm_recipe
    import lm_text
    import lm_world

    context = lm_recipe.Recipe.context
    corpus = lm_text.load_corpus(
        file=None, stdlib=False, windows=world.world_size, context=context
    )
    place = lm_world.World(world.rank, world.world_size, world.device)
    with redirect_stdout(io.StringIO()) as printed:
        elastic_resume.run(elastic_resume.parse(asked(folder)), corpus, place)
    return printed.getvalue()


@pytest.mark.full_matrix(
    "faults/test_deaths.py goes on after kills; test_round_trip.py on other ranks"
)
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.req("U-07", "X-04", "X-24")
def test_training_goes_on_where_a_killed_save_left_it_on_any_number_of_ranks(
    ranks: RankCount, tmp_path: Path
) -> None:
    """The loss curve is that of an unbroken run: to the bit on as many ranks."""
    unbroken = losses_in(ranks(2).run(run_example, tmp_path / "unbroken")[0])
    broken = tmp_path / "broken"

    first, last = launch(
        *(*asked(broken), "--die-in-save", str(BROKEN_AT)),
        ranks=2,
        folder=tmp_path,
        program=EXAMPLE,
    )

    text = first.output
    assert first.status == 1, text
    assert last.status == -signal.SIGKILL
    assert list(unbroken) == list(range(1, STEPS + 1))
    assert losses_in(text) == {step: unbroken[step] for step in range(1, BROKEN_AT + 1)}
    assert verify(broken)
    assert verify(broken).path == str(broken / "step-000002")
    for size in (1, 2, 3):
        copy = tmp_path / f"on-{size}"
        shutil.copytree(broken, copy)

        if size == 3:
            status, text = run_script(
                str(EXAMPLE), *asked(copy), ranks=size, folder=tmp_path
            )
            assert status == 0, text
        else:
            text = ranks(size).run(run_example, copy)[0]

        after = losses_in(text)
        assert f"resumed after step 2 on {size} ranks" in text
        assert list(after) == list(range(3, STEPS + 1))
        expected = {step: unbroken[step] for step in after}
        tolerance = 0.0 if size == 2 else 1e-6
        assert after == pytest.approx(expected, rel=tolerance, abs=0.0)
        assert verify(copy / f"step-{STEPS:06d}")

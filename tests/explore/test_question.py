"""Questions come from an address that anybody may type: bad ones are refused with a sentence, large ones too."""

import re

import pytest

from gapless.errors import GaplessError
from gapless.explore.question import Question, read_question


def test_what_is_not_asked_has_its_default() -> None:
    assert read_question("") == Question()
    asked = read_question("schedule=interleaved&devices=4&stages_per_device=3&forward=1.5&latency=0&memory_limit=8.0")
    assert asked == Question("interleaved", 4, stages_per_device=3, forward=1.5, memory_limit=8)
    assert [type(asked.devices), type(asked.memory_limit), type(asked.forward)] == [int, int, float]


def test_stages_per_device_are_asked_only_of_recipes_that_take_them() -> None:
    def asked(count: int) -> list[int | None]:
        names = ("1f1b", "zb-v", "auto", "looped-bfs")
        return [Question(name, stages_per_device=count).own_stages_per_device for name in names]

    assert asked(2) == [None, 2, 2, 2]
    assert asked(3) == [None, None, None, 3]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("schedule=zb-w", "there is no schedule named 'zb-w'; did you mean zb-v?"),
        ("schedule=optimal", "optimal searches for minutes: run `gapless simulate optimal` instead"),
        ("devices=", "devices is '', but it must be a whole number from 1 to 64"),
        ("devices=0", "devices is '0', but it must be a whole number from 1 to 64"),
        ("devices=65", "devices is '65', but it must be a whole number from 1 to 64"),
        ("devices=2.5", "devices is '2.5', but it must be a whole number from 1 to 64"),
        ("microbatches=1e9", "microbatches is '1e9', but it must be a whole number from 1 to 512"),
        ("forward=-1", "forward is '-1', but it must be a number from 0 to 1000"),
        ("weight_grad=nan", "weight grad is 'nan', but it must be a number from 0 to 1000"),
        ("latency=inf", "latency is 'inf', but it must be a number from 0 to 1000"),
        ("input_grad=" + "9" * 500, f"input grad is '{'9' * 40}', but it must be a number from 0 to 1000"),
        ("memory_limit=0", "memory limit is 0, but nothing fits into that: leave it out for none"),
        ("minibatches=3", "there is no slider 'minibatches'"),
        ("x=" + "1" * 2000, "the question has 2002 characters, but at most 1000 are read"),
        (
            "schedule=zb-v&devices=64&microbatches=512",
            (
                "zb-v would have up to 196,608 actions, and this page draws 40,000: use fewer devices or microbatches, "
                "or `gapless show --html`, which draws millions"
            ),
        ),
        (
            "schedule=auto&devices=32&microbatches=65",
            (
                "on this page auto takes at most 2,048 devices times microbatches, not 2,080: use fewer, "
                "or `gapless show auto`"
            ),
        ),
    ],
)
def test_what_makes_no_sense_or_takes_long_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(GaplessError, match=f"^{re.escape(sentence)}$"):
        read_question(text)

"""Batches: real text, or one's own, checked as they come."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from gapless.errors import ConfigError
from gapless.train.config import read_config
from gapless.train.data import batches, python_source
from tests.train.configs import write


def test_python_source_is_windows_of_text_and_the_same_one_byte_later() -> None:
    inputs, target = next(python_source(3, seed=0, context=100))
    assert inputs.shape == target.shape == (3, 100)
    assert inputs.dtype == torch.long
    assert torch.equal(inputs[:, 1:], target[:, :-1])
    assert all(bytes(row).decode("utf-8", "ignore") for row in inputs.tolist())


def test_the_seed_decides_what_is_drawn() -> None:
    one, again, other = (next(python_source(3, seed=seed))[0] for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_context_longer_than_the_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="context is 1000000000, but it must be a whole number from 1 to "):
        python_source(1, seed=0, context=10**9)


def test_every_pass_over_ones_own_data_has_a_seed_of_its_own(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    found = list(islice(batches(config), 10))
    again = list(islice(batches(config), 10))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(found, again, strict=True))
    chance = torch.Generator().manual_seed(config.seed + 1)
    assert torch.equal(found[4][0], torch.randn(6, 8, generator=chance))  # 4 batches make a pass


def test_a_function_that_takes_no_size_gives_what_it_has(tmp_path: Path) -> None:
    found = list(islice(batches(read_config(write(tmp_path, (":batches", ":fixed")))), 3))
    assert [len(inputs) for inputs, _ in found] == [6, 6, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((":batches", ":nothing"), "data: mine.py:nothing gave no batch in pass 1"),
        (
            (":batches", ":without_target"),
            "data: batch 1 of mine.py:without_target has the target None, but the loss cross_entropy needs one",
        ),
        (
            (":batches", ":another_size"),
            "data: batch 1 of mine.py:another_size has 6 samples in its inputs and 4 in its target: the first",
        ),
        ((":batches", ":triples"), "data: batch 1 of mine.py:triples is a tuple of 3, but it must be a pair (inputs,"),
        ((":batches", ":number"), "data: mine.py:number returned 3, but it must return an iterable of batches"),
        ((":batches", ":batch"), "data.name is 'mine.py:batch', but mine.py has no function batch; did you mean"),
        (("mine.py:batches", "none.py:f"), "data.name is 'none.py:f', but there is no file "),
        (("mine.py:batches", "a.b.c:f"), "data.name is 'a.b.c:f', but there is no module a: a file is 'file.py:f"),
        (
            ("minibatch = 6", "minibatch = 6\narguments = { cuont = 2 }"),
            "data.arguments has 'cuont', which mine.py:batches does not take; did you mean count?",
        ),
    ],
)
def test_what_is_no_data_is_said(tmp_path: Path, changes: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        next(batches(read_config(write(tmp_path, changes))))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("data", ["without_target", "another_size"])
def test_a_loss_of_ones_own_takes_any_target(tmp_path: Path, data: str) -> None:
    config = read_config(write(tmp_path, (":batches", f":{data}"), ('"cross_entropy"', '"mine.py:no_number"')))
    assert len(next(batches(config))[0]) == 6


def test_a_batch_of_another_size_is_refused(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, (":batches", ":fixed"))).changed(minibatch=12)
    with pytest.raises(
        ConfigError, match=r"data\.minibatch is 12, but the first batch of mine\.py:fixed has 6 samples"
    ):
        next(batches(config))


def test_an_error_in_ones_own_function_is_told_with_its_place_and_stays_the_cause(tmp_path: Path) -> None:
    found = batches(read_config(write(tmp_path, (":batches", ":ends_badly"))))
    next(found)
    with pytest.raises(ConfigError) as error:
        next(found)
    assert str(error.value) == (
        "data: batch 2 of mine.py:ends_badly failed with KeyError: 'no more', at mine.py, line 52, in ends_badly"
    )
    assert isinstance(error.value.__cause__, KeyError)


def test_a_file_that_can_t_be_loaded_is_told_with_its_line_and_can_be_mended(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    (tmp_path / "mine.py").write_text("import torch\nx = 1 / 0\n")
    with pytest.raises(ConfigError) as error:
        next(batches(config))
    assert str(error.value) == (
        "data.name: loading mine.py failed with ZeroDivisionError: division by zero, at mine.py, line 2, in <module>"
    )
    write(tmp_path)
    next(batches(config))

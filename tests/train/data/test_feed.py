"""Batches: real text, or one's own, checked as they come."""

import csv
import gzip
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from gapless.errors import ConfigError
from gapless.train.config.config import Config, read_config
from gapless.train.data.feed import Batch, Feed, make_feeds
from gapless.train.data.sources import records, text
from gapless.train.job import build
from tests.train.configs import CONFIG, GPT, write


def feed(config: Config, **options: Any) -> Feed:
    return make_feeds(config, {}, **options)[0]


def test_python_source_is_windows_of_text_and_the_same_one_byte_later(tmp_path: Path) -> None:
    inputs, target = next(feed(read_config(write(tmp_path, text=GPT), ["data.arguments.context=100"])))
    assert inputs.shape == target.shape == (4, 100)
    assert inputs.dtype == torch.long
    assert torch.equal(inputs[:, 1:], target[:, :-1])
    assert all(bytes(row).decode("utf-8", "ignore") for row in inputs.tolist())


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    file = write(tmp_path, text=GPT)
    one, again, other = (next(feed(read_config(file, [f"train.seed={seed}"])))[0] for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def corpus(tmp_path: Path, *settings: str) -> Config:
    """Text whose windows of 4 begin with a letter each: A1234B1234..., 23 of them."""
    (tmp_path / "some.txt").write_bytes(b"".join(bytes([65 + n]) + b"123" for n in range(23)) + b"!")
    named = ["data.name=text", 'data.arguments={ files = "some.txt", context = 4 }', "data.minibatch=4"]
    return read_config(write(tmp_path, text=GPT), [*named, *settings])


def starts(batches: Iterable[Batch]) -> list[str]:
    return ["".join(chr(int(row[0])) for row in inputs) for inputs, _ in batches]


def test_a_pass_has_every_window_once_but_for_what_is_left_over(tmp_path: Path) -> None:
    found = starts(islice(feed(corpus(tmp_path)), 10))
    first, second = "".join(found[:5]), "".join(found[5:])
    assert len(first) == len(set(first)) == len(set(second)) == 20
    assert first != second
    assert set(first) < {chr(65 + n) for n in range(23)}


def test_a_feed_goes_on_from_any_position(tmp_path: Path) -> None:
    whole = corpus(tmp_path)
    own = read_config(write(tmp_path))  # 4 batches make a pass
    for config in (whole, own):
        first = feed(config)
        kept = [(dict(first.position), next(first)) for _ in range(9)]
        for position, batch in kept:
            other = feed(config)
            other.seek(position)
            assert other.position == position
            assert torch.equal(next(other)[0], batch[0])


def test_every_replica_knows_how_many_samples_all_have(tmp_path: Path) -> None:
    """Speed was that of the first replica times their number: 6 samples are 2, 2, 1 and 1."""
    for config in (CONFIG, GPT.replace("minibatch = 4", "minibatch = 6")):
        for replica in range(4):
            found = feed(read_config(write(tmp_path, text=config)), share=(replica, 4))
            inputs, _ = next(found)
            assert (len(inputs), found.samples) == (2 if replica < 2 else 1, 6)


def test_replicas_share_each_minibatch_and_together_see_the_same_samples(tmp_path: Path) -> None:
    for config in (corpus(tmp_path, "data.minibatch=6"), read_config(write(tmp_path))):
        whole = list(islice(feed(config), 5))
        parts = [list(islice(feed(config, share=(each, 2)), 5)) for each in range(2)]
        for batch, one, other in zip(whole, *parts, strict=True):
            assert len(one[0]) == len(other[0]) == 3
            assert torch.equal(torch.cat([one[0], other[0]]), batch[0])
            assert torch.equal(torch.cat([one[1], other[1]]), batch[1])


def test_what_is_evaluated_on_is_never_trained_on_and_always_the_same(tmp_path: Path) -> None:
    config = corpus(tmp_path, "evaluate.every=1", "evaluate.held_out=0.2")
    train, held = make_feeds(config, {})
    assert held is not None
    seen, kept = "".join(starts(islice(train, 20))), "".join(starts(islice(held, 1)))
    assert set(kept) < {"S", "T", "U", "V", "W"}
    assert "".join(starts(islice(make_feeds(config, {})[1] or [], 1))) == kept
    assert not set(seen) & {"S", "T", "U", "V", "W"}


def test_data_ends_after_its_passes(tmp_path: Path) -> None:
    assert len(list(feed(corpus(tmp_path, "data.passes=2")))) == 10
    assert len(list(feed(read_config(write(tmp_path), ["data.passes=3"])))) == 12


def test_token_files_are_mapped_and_windows_stay_within_a_file(tmp_path: Path) -> None:
    ids = torch.arange(60_000, 60_041).to(torch.int32)
    ids.to(torch.int16).numpy().tofile(tmp_path / "a.bin")  # as uint16
    import numpy

    numpy.save(tmp_path / "b.npy", ids[:25].numpy().astype("uint16"))
    arguments = 'data.arguments={ files = ["a.bin", "b.npy"], context = 8 }'
    settings = ["data.name=tokens", arguments, "data.passes=1", "data.minibatch=1"]
    batches = list(feed(read_config(write(tmp_path, text=GPT), settings)))
    assert sorted(int(inputs[0, 0]) - 60_000 for inputs, _ in batches) == [0, 0, 8, 8, 16, 16, 24, 32]
    assert all(torch.equal(inputs[0] + 1, target[0]) for inputs, target in batches)


def test_token_files_of_several_types_are_refused(tmp_path: Path) -> None:
    import numpy

    numpy.save(tmp_path / "a.npy", numpy.arange(40, dtype="int32"))
    numpy.arange(40, dtype="uint16").tofile(tmp_path / "b.bin")
    settings = ["data.name=tokens", 'data.arguments={ files = ["a.npy", "b.bin"], context = 8 }']
    with pytest.raises(ConfigError, match=r"the tokens are int32 in .*a\.npy and uint16 in .*b\.bin: write all files"):
        feed(read_config(write(tmp_path, text=GPT), settings))


def test_records_of_every_form_are_one_text(tmp_path: Path) -> None:
    words = ["one", 'two, "three"', "fünf"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in words), "utf-8")
    (tmp_path / "a.json").write_text(json.dumps([{"text": each} for each in words]), "utf-8")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": each}) + "\n" for each in words)
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as rows:
        csv.writer(rows).writerows([["number", "text"], *([str(n), each] for n, each in enumerate(words))])
    said = 'one\ntwo, "three"\nfünf\n'.encode()
    for name in ("a.jsonl", "a.json", "a.jsonl.gz", "a.csv"):
        made = records("bytes", tmp_path, name, context=4)
        assert bytes(made.pieces[0].tolist()) == said, name


def test_a_tokenizer_is_used_where_one_is_named(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "words.txt").write_text("a b c a b a")
    found = text("tokenizer.json", tmp_path, "words.txt", context=2)
    assert found.pieces[0].tolist() == [0, 1, 2, 0, 1, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.arguments.context=1000000000000"], "a minibatch of 4 samples of 1,000,000,000,000 tokens takes"),
        (["data.arguments.context=0"], "data.arguments: context is 0, but it must be a whole number from 1 to "),
        (["data.name=text"], "data.arguments: text needs files, a file, a folder, a pattern or a list of these, as"),
        (["data.name=text", "data.arguments.files=no.txt"], "data: there is no file "),
        (["data.name=text", "data.arguments.files=."], "has no *.txt: set pattern, as pattern = '*.md'"),
        (
            ["data.name=text", "data.arguments.files=x.md"],
            "data: text has 1 window of 8 tokens, but a minibatch has 4",
        ),
        (
            ["data.name=records", "data.arguments.files=x.jsonl"],
            "record 1 of {}/x.jsonl has no text in 'text', but body",
        ),
        (["data.name=records", "data.arguments.files=x.md"], "x.md is none of .jsonl, .json, .jsonl.gz, .csv, .tsv"),
        (["data.name=records", "data.arguments.files=y.jsonl"], "line 2 of {}/y.jsonl is not JSON"),
        (["data.name=tokens", "data.arguments.files=x.md"], "has 9 bytes, which are no whole number of uint16 tokens"),
        (["data.tokenizer=no.json"], "data.tokenizer is 'no.json', but there is no file "),
        (["data.tokenizer=x.jsonl"], "data.tokenizer: {}/x.jsonl can't be read"),
        (["model.arguments.vocab=100"], "python-source has the token 1"),
    ],
)
def test_files_that_are_no_data_are_said(tmp_path: Path, settings: list[str], message: str) -> None:
    (tmp_path / "x.md").write_text("012345678")
    (tmp_path / "x.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "y.jsonl").write_text('{"text": "a"}\n{"text"\n')
    with pytest.raises(ConfigError) as error:
        build(read_config(write(tmp_path, text=GPT), settings))
    assert message.format(tmp_path) in str(error.value)


def test_every_pass_over_ones_own_data_has_a_seed_of_its_own(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    found = list(islice(feed(config), 10))
    again = list(islice(feed(config), 10))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(found, again, strict=True))
    chance = torch.Generator().manual_seed(config.train.seed + 1)
    assert torch.equal(found[4][0], torch.randn(6, 8, generator=chance))  # 4 batches make a pass


def test_a_function_that_takes_no_size_gives_what_it_has(tmp_path: Path) -> None:
    found = list(islice(feed(read_config(write(tmp_path, (":batches", ":fixed")))), 3))
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
        next(feed(read_config(write(tmp_path, changes))))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("data", ["without_target", "another_size"])
def test_a_loss_of_ones_own_takes_any_target(tmp_path: Path, data: str) -> None:
    config = read_config(write(tmp_path, (":batches", f":{data}"), ('"cross_entropy"', '"mine.py:no_number"')))
    assert len(next(feed(config))[0]) == 6


def test_a_batch_of_another_size_is_refused(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, (":batches", ":fixed"))).changed(minibatch=12)
    with pytest.raises(
        ConfigError, match=r"data\.minibatch is 12, but the first batch of mine\.py:fixed has 6 samples"
    ):
        next(feed(config))


def test_an_error_in_ones_own_function_is_told_with_its_place_and_stays_the_cause(tmp_path: Path) -> None:
    found = feed(read_config(write(tmp_path, (":batches", ":ends_badly"))))
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
        next(feed(config))
    assert str(error.value) == (
        "data.name: loading mine.py failed with ZeroDivisionError: division by zero, at mine.py, line 2, in <module>"
    )
    write(tmp_path)
    next(feed(config))

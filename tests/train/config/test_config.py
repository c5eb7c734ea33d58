"""A config says what it means, and all that is wrong with it is said at once."""

import contextlib
import random
import re
from pathlib import Path

import pytest

from gapless.errors import ConfigError
from gapless.train.config import manual
from gapless.train.config.config import parse_config, read_config
from gapless.train.config.tables import Layout, LossKeys, ModelKeys, OptimizerKeys
from tests.train.configs import CONFIG, GPT, write

ROOT = Path(__file__).parents[3]


def test_a_config_is_read_as_it_says(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    assert config.folder == tmp_path
    assert config.model == ModelKeys("mine.py:make", {"depth": 5, "dropout": 0.25})
    assert (config.data.name, config.data.where, config.data.arguments) == ("mine.py:batches", "mine.py:batches", {})
    assert config.loss == LossKeys("cross_entropy")
    assert config.loss.where == "torch.nn.functional:cross_entropy"
    assert config.optimizer == OptimizerKeys("AdamW", {"lr": 0.01})
    assert config.pipeline == Layout(("cpu", "cpu"), schedule="zb-h1", microbatches=4)
    assert (config.data.minibatch, config.train.steps, config.train.clip, config.train.seed) == (6, 6, 0.5, 7)


def test_what_is_not_said_is_what_most_want() -> None:
    config = parse_config('[model]\nname = "gpt"\n[data]\nname = "python-source"\nminibatch = 4\n', Path())
    assert config.loss == LossKeys("next_token")
    assert config.loss.where == "gapless.zoo.gpt:next_token_loss"
    assert config.optimizer == OptimizerKeys("AdamW")
    assert config.optimizer.where == "torch.optim:AdamW"
    assert config.pipeline == Layout(devices=4)
    assert (config.train.steps, config.train.clip, config.train.seed, config.num_devices) == (100, None, 0, 4)
    own = parse_config('[model]\nname = "a.b:c"\n[data]\nname = "d.py:e"\nminibatch = 4\n', Path())
    assert own.loss is None  # the model's own


def test_the_long_name_of_what_is_known_is_the_short_one(tmp_path: Path) -> None:
    """`torch.nn.functional:cross_entropy` with reduction = "sum" would count as a mean, if it were one's own."""
    assert read_config(write(tmp_path, ('"cross', '"torch.nn.functional:cross'))) == read_config(write(tmp_path))


def test_a_loss_of_ones_own_may_have_any_arguments(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, ('"cross_entropy"', '"mine.py:loss"\narguments = { reduce = false }')))
    assert config.loss == LossKeys("mine.py:loss", {"reduce": False})


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        ("clip", "clipp"),
        ("steps = 6", "steps = 0"),
        ("minibatch = 6", "minibatch = '6'"),
        ("AdamW", "adamw"),
        ("[loss]", "[los]"),
        ("zb-h1", "zbh1"),
        ('["cpu", "cpu"]', '["cpu", "gpu"]'),
    )
    with pytest.raises(ConfigError) as error:
        read_config(file)
    assert str(error.value).split("; ") == [
        f"{file}: los is not understood",
        "did you mean loss?",
        "data.minibatch is '6', but it must be a whole number of at least 1",
        "optimizer.name is 'adamw', which is not known",
        "did you mean AdamW?",
        "pipeline.devices has 'gpu', but a device is 'cpu', or as 'cuda:0'",
        "pipeline.schedule is 'zbh1', but there is no schedule named 'zbh1'",
        "did you mean zb-h1?",
        "train.clipp is not understood",
        "did you mean clip?",
        "train.steps is 0, but it must be a whole number of at least 1",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mine.py:make", "gtp", "model.name is 'gtp', which is not known; did you mean gpt?"),
        (
            "mine.py:make",
            "lstm",
            "it is gpt, resnet, transformer, unet, huggingface, or your own as 'file.py:function'",
        ),
        ("mine.py:make", "mine.py:", "model.name is 'mine.py:', which is not known"),
        ('"mine.py:make"', "3", "model.name is 3, but it must be a text"),
        ("cross_entropy", "entropy", "loss.name is 'entropy', which is not known; did you mean cross_entropy?"),
        ('"cross_entropy"', '""', "loss.name is '', but it must be a text"),
        (
            '"cross_entropy"',
            '"mse_loss"\narguments = { size_average = false }',
            "loss.arguments has 'size_average', which torch has replaced: use reduction, 'mean' or 'sum'",
        ),
        (
            '"cross_entropy"',
            '"torch.nn.functional:mse_loss"\narguments = { reduce = false }',
            "loss.arguments has 'reduce', which torch has replaced: use reduction, 'mean' or 'sum'",
        ),
        ("AdamW", "SparseAdam", "optimizer.name is 'SparseAdam', which is not known"),  # for sparse gradients alone
        (
            "{ lr = 0.01 }",
            "0.01",
            "optimizer.arguments is 0.01, but it must be a table such as { width = 64, depth = 8 }",
        ),
        ("minibatch = 6", "", "data.minibatch is missing: samples in a step, as 16"),
        (
            'name = "mine.py:batches"',
            "",
            "data.name is missing: python-source or text or records or tokens, or 'file.py:function'",
        ),
        ('["cpu", "cpu"]', "0", "pipeline.devices is 0, but it must be a whole number of at least 1"),
        (
            '["cpu", "cpu"]',
            '"cpu"',
            "pipeline.devices is 'cpu', but it must be a number, or a list such as ['cuda:0', 'cuda:1']",
        ),
        ("microbatches = 4", "memory = '24 GB/s'", "pipeline.memory is '24 GB/s', but it must be a number of bytes"),
        ("microbatches = 4", "offload = 'auto'", "pipeline.offload is 'auto', but it must be none, activations, or a"),
        ("microbatches = 4", "remat = 'all'", "pipeline.remat is 'all', but it must be none, stage, layer, or a list"),
        ("microbatches = 4", "partition = 3", "pipeline.partition is 3, but it must be a list of whole numbers"),
        ("microbatches = 4", "mocrobatches = 4", "pipeline.mocrobatches is not understood; did you mean microbatches?"),
        ("clip = 0.5", "clip = nan", "train.clip is nan, but it must be a number above 0"),
        (
            "clip = 0.5",
            "zzz = 1",
            "train.zzz is not understood; train takes steps, clip, seed, precision, accumulate, skip",
        ),
        ("seed = 7", "seed = -1", "train.seed is -1, but it must be a whole number of at least 0"),
        ("seed = 7", "seed = = 7", "it is not TOML: Invalid value (at line 25, column 8)"),
        (
            "microbatches = 4",
            "plan = 'auto'\noffload = ['none', 'activations']",
            "pipeline.offload lists stages, but plan = 'auto' chooses them: write offload = 'activations'",
        ),
        (
            "microbatches = 4",
            "plan = 'auto'\npartition = [3, 3]",
            "pipeline.partition is given, but plan = 'auto' chooses it: leave one of them out",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(write(tmp_path, (old, new)))
    assert message in str(error.value)
    assert str(error.value).startswith(str(tmp_path))


def test_a_config_without_a_model_says_how_to_give_one() -> None:
    with pytest.raises(ConfigError) as error:
        parse_config("model = 3", Path())
    assert str(error.value) == (
        "model is 3, but it must be a table: write [model] and below it its keys; [data] is missing: write [data] and "
        "below it name and minibatch = ..."
    )


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file nowhere\.toml"):
        read_config("nowhere.toml")
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"a\.toml is not text; a config is a TOML file"):
        read_config(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_bytes(b"#" * 2**21)
    with pytest.raises(ConfigError, match=r"b\.toml has 2 MiB, but a config has at most 1 MiB"):
        read_config(tmp_path / "b.toml")


def test_options_take_the_place_of_what_the_file_says(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    assert config.changed() == config
    changed = config.changed(steps=3, minibatch=9)
    assert (changed.train.steps, changed.data.minibatch, changed.changed(steps=6, minibatch=6)) == (3, 9, config)
    assert config.changed(devices=3, microbatches=2).pipeline == Layout(3, schedule="zb-h1", microbatches=2)
    assert config.changed(plan="auto").pipeline == Layout(("cpu", "cpu"), plan="auto")
    assert config.changed(plan="auto", microbatches=2).pipeline == Layout(("cpu", "cpu"), plan="auto", microbatches=2)


def test_a_setting_takes_the_place_of_any_key(tmp_path: Path) -> None:
    asked = [
        "train.steps=3",
        "model.arguments.depth = 9",
        "pipeline.schedule=zb-v",
        "scheduler.warmup=2",
        'run.folder="a"',
    ]
    config = read_config(write(tmp_path), asked)
    assert (config.train.steps, config.model.arguments["depth"], config.pipeline.schedule) == (3, 9, "zb-v")
    assert (config.scheduler.warmup, config.run.folder) == (2, "a")
    for wrong, message in (
        ("steps=3", "--set 'steps=3' is not understood: write a key and its value, as train.steps=50"),
        ("train.steps", "--set 'train.steps' is not understood"),
        ("train.steps.more=3", "--set 'train.steps.more=3': steps is a value in the config, not a table"),
        ("train.stepz=3", "train.stepz is not understood; did you mean steps?"),
        ("train.steps=many", "train.steps is 'many', but it must be a whole number of at least 1"),
    ):
        with pytest.raises(ConfigError) as error:
            read_config(write(tmp_path), [wrong])
        assert message in str(error.value)


def test_a_key_in_the_wrong_table_is_told_where_it_belongs(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"train\.microbatches is not understood; did you mean pipeline\.microbatches\?"
    ):
        read_config(write(tmp_path, ("clip = 0.5", "microbatches = 4")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["scheduler.name=StepLR", "scheduler.warmup=3"], "scheduler.warmup is for constant, linear, cosine, but"),
        (
            ["scheduler.name=cosine", "scheduler.arguments.gamma=3"],
            "scheduler.arguments is given, but cosine takes none",
        ),
        (["evaluate.every=3"], "evaluate.name is missing: nothing can be held out of your own data, so name other"),
        (["evaluate.patience=3"], "evaluate.patience is given, but evaluate.every is not: set how often to evaluate"),
        (["train.precision=bf32"], "train.precision is 'bf32', which is not known; it is float32, bf16, fp16"),
        (["evaluate.held_out=1"], "evaluate.held_out is 1, but it must be a number of at least 0 and below 1"),
        (["scheduler.floor=2"], "scheduler.floor is 2, but it must be a number from 0 to 1"),
    ],
)
def test_keys_that_do_not_go_together_are_said(tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(write(tmp_path), settings)
    assert message in str(error.value)


def test_every_config_of_the_examples_is_right() -> None:
    files = sorted((ROOT / "examples").glob("**/*.toml"))
    assert files
    for file in files:
        read_config(file)


def test_the_commented_config_is_right_and_its_comments_too() -> None:
    written = parse_config(manual.example(), Path())
    assert (written.model.name, written.train.steps) == ("gpt", 100)
    opened = re.sub(r"^# (\w+ = )", r"\1", manual.example(), flags=re.MULTILINE)
    for line in ('plan = "auto"\n', "arguments = {}\n"):
        opened = opened.replace(line, "")
    assert set(parse_config(opened, Path()).as_json()["run"]) == {
        "folder",
        "timeline",
        "tensorboard",
        "wandb",
        "report",
    }


def test_the_docs_show_the_example_as_it_is() -> None:
    example = (ROOT / "examples" / "gpt.toml").read_text()
    read_config(ROOT / "examples" / "gpt.toml")
    assert f"```toml\n{example}```" in (ROOT / "docs" / "training.md").read_text()


@pytest.mark.parametrize("seed", range(4))
def test_100_mutated_configs_are_read_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        characters = list(chance.choice([CONFIG, GPT]))
        for _ in range(chance.randint(1, 5)):
            at = chance.randrange(len(characters))
            characters[at : at + chance.randint(0, 8)] = chance.choices(
                'abc019[]{}=".,:-\n \0é', k=chance.randint(0, 3)
            )
        with contextlib.suppress(ConfigError):
            parse_config("".join(characters), Path())

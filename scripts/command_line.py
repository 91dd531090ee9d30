"""What the scripts share: flags made from the library's dataclasses, --config files, errors.

The fields and docstrings of EngineConfig and SamplingParams are the only list of options: tyro
turns them into flags and help. jax is not imported before the command line is known to be right.
"""

import argparse
import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import tyro
import yaml

from tinyvllm_jax.config import EngineConfig
from tinyvllm_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinyvllm_jax import LLM

# What a model's generation_config.json may recommend.
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(SamplingParams):
    """How tokens are chosen and when an answer ends. The model's generation_config.json, if it has
    one, replaces the defaults of temperature, top-p, top-k and min-p.
    """

    # --seed is the engine's: the requests of a script draw theirs from it.
    seed: tyro.conf.Suppress[int | None] = None
    max_tokens: int | None = 256
    # A list is the one form that the command line has.
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of every script; each adds its own."""

    config: Path | None = None
    """YAML file with engine and sampling options (configs/*.yaml); flags given here override it."""
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    chosen: tyro.conf.Suppress[frozenset[str]] = frozenset()
    """Options that the user set, in a file or by a flag."""

    def sampling_params(self, llm: "LLM") -> SamplingParams:
        """The sampling options, with the model's recommendations where the user chose nothing."""
        recommended = llm.get_default_sampling_params()
        return dataclasses.replace(
            self.sampling,
            **{n: getattr(recommended, n) for n in RECOMMENDED if n not in self.chosen},
        )


def parse[T: Options](kind: type[T], argv: Sequence[str] | None = None) -> T:
    """Reads the command line: defaults, overridden by the --config file, overridden by flags.

    Raises:
      ValueError, OSError: the --config file is wrong or can't be read.
      SystemExit: the command line is wrong (2) or asks for --help (0).
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    path = finder.parse_known_args(argv)[0].config
    values = {} if path is None else read_config(Path(path))
    flags = {a.split("=")[0][2:].replace("-", "_") for a in argv if a.startswith("--")}
    engine = {name: value for name, value in values.items() if name in _names(EngineConfig)}
    sampling = {name: value for name, value in values.items() if name not in engine}
    default = kind(
        engine=EngineConfig(**engine),
        sampling=dataclasses.replace(kind().sampling, **sampling),
    )
    options = tyro.cli(
        kind,
        args=argv,
        default=default,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    return dataclasses.replace(options, chosen=frozenset(flags | values.keys()))


def parse_plain[T](kind: type[T], argv: Sequence[str] | None = None) -> T:
    """Reads the command line of a script that has no --config file."""
    return tyro.cli(
        kind,
        args=argv,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )


def read_config(path: Path) -> dict[str, Any]:
    """The options in a YAML file; names may be written with dashes.

    Raises:
      ValueError: not a mapping, or a name that is no engine or sampling option.
      OSError: the file can't be read.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold `option: value` lines, got {type(content).__name__}")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    valid = _names(EngineConfig) | _names(SamplingParams)
    for key in values:
        if key not in valid:
            near = difflib.get_close_matches(key, sorted(valid), n=1, cutoff=0)
            raise ValueError(f"{path}: unknown option {key!r}; the nearest is {near[0]!r}")
    return values


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def make_llm(config: EngineConfig) -> "LLM":
    """Starts the engine; loading and compiling show progress on a terminal only."""
    from tinyvllm_jax import LLM

    settings = {name: getattr(config, name) for name in _names(EngineConfig)}
    return LLM(**settings, show_progress=sys.stderr.isatty())


def run(main: Callable[[], None]) -> NoReturn:
    """Runs a script and exits: 0, 2 with one line on stderr for a wrong input, 130 after Ctrl-C."""
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError, NotImplementedError) as error:
        print("error:", " ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        sys.exit(2)
    sys.exit(0)

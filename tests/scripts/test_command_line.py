"""command_line.run (how scripts end) and the rest of parse that a script's own tests don't reach."""

import subprocess
import sys
from pathlib import Path

import command_line
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def ended(main, capsys) -> tuple[object, str]:
    """Exit status and what went to stderr."""
    with pytest.raises(SystemExit) as exit_:
        command_line.run(main)
    return exit_.value.code, capsys.readouterr().err


def raising(error: BaseException):
    def main() -> None:
        raise error

    return main


def test_success(capsys):
    assert ended(lambda: None, capsys) == (0, "")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("max_tokens must be\n  positive"), "error: max_tokens must be positive\n"),
        (
            FileNotFoundError(2, "No such file", "x.yaml"),
            "error: [Errno 2] No such file: 'x.yaml'\n",
        ),
        (NotImplementedError(), "error: NotImplementedError\n"),
    ],
)
def test_wrong_input_is_one_line(error, line, capsys):
    assert ended(raising(error), capsys) == (2, line)


def test_ctrl_c(capsys):
    assert ended(raising(KeyboardInterrupt()), capsys) == (130, "")


def test_a_defect_keeps_its_traceback():
    with pytest.raises(RuntimeError):
        command_line.run(raising(RuntimeError("defect")))


def test_a_reader_that_leaves_early_is_no_error():
    code = "import command_line; command_line.run(lambda: print('x' * 10_000_000))"
    command = f'{sys.executable} -c "{code}" | head -c 1'
    done = subprocess.run(
        ["bash", "-c", command], cwd=SCRIPTS, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("x", "")


def test_unknown_flags_name_the_nearest(capsys):
    with pytest.raises(SystemExit) as exit_:
        command_line.parse(command_line.Options, ["--max-num-seq", "3"])
    assert exit_.value.code == 2
    assert "--max-num-seqs" in capsys.readouterr().err


def test_wrong_values_in_a_config_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("max_num_seqs: many\n")
    with pytest.raises(ValueError, match="max_num_seqs"):
        command_line.parse(command_line.Options, ["--config", str(file)])
    file.write_text("a: [")
    with pytest.raises(ValueError, match="not valid YAML"):
        command_line.parse(command_line.Options, [f"--config={file}"])
    file.write_text("# nothing chosen\n")
    assert command_line.parse(command_line.Options, ["--config", str(file)]).chosen == {"config"}
    with pytest.raises(FileNotFoundError):
        command_line.parse(command_line.Options, ["--config", str(tmp_path / "none.yaml")])

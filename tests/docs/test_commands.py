"""Every `rollout-buffer` command that the docs show is one that the command line takes.

Nothing is run: the words are given to the parser. In fences they are whole commands; within sentences they may leave
out what is required, but name commands and options that there are.
"""

from pathlib import Path
from typing import Any

import pytest
import typer

from buffer_cli.main import app
from tests.docs.pages import Block, blocks, inline_code, pages, shell_words

SHELLS = {"sh", "bash", "console"}
ELLIPSES = {"…", "..."}


def without_callbacks(command: Any) -> Any:
    """Make the same command line, all of whose commands do nothing once their words are understood."""
    command.callback = None
    for child in getattr(command, "commands", {}).values():
        without_callbacks(child)
    return command


COMMAND = without_callbacks(typer.main.get_command(app))


def status_of(arguments: list[str]) -> int:
    """Tell with what status the command line ends; 2 where it does not understand."""
    with pytest.raises(SystemExit) as ended:
        COMMAND.main(args=arguments, prog_name="rollout-buffer")
    return int(ended.value.code or 0)


def shown(block: Block) -> list[list[str]]:
    """The words behind `rollout-buffer` of each command in a fence."""
    text = block.text
    if not block.language:
        # Output, drawings, and now and then a command.
        lines = text.replace("\\\n", " ").splitlines(keepends=True)
        text = "".join(line for line in lines if line.startswith("rollout-buffer "))
    elif block.language not in SHELLS:
        return []
    return [words[1:] for words in shell_words(text) if Path(words[0]).name == "rollout-buffer"]


FENCED = [(block.where, words) for page in pages() for block in blocks(page) for words in shown(block)]
INLINE = sorted({code for page in pages() for code in inline_code(page) if code.startswith("rollout-buffer ")})


@pytest.mark.parametrize(("where", "words"), FENCED, ids=[f"{where} {' '.join(words)}" for where, words in FENCED])
def test_a_command_in_a_fence_parses(where: str, words: list[str]) -> None:
    """Options that are given no value yet (`--sglang-python …`) are given the ellipsis."""
    assert status_of(words) == 0


@pytest.mark.parametrize("code", INLINE)
def test_a_command_in_a_sentence_names_commands_and_options_that_exist(code: str) -> None:
    words = next(shell_words(code.partition("|")[0]))
    command = COMMAND
    for word in words[1:]:
        if word == "--":
            break
        if word.startswith("-"):
            names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            assert word.split("=")[0] in {"--help", *names}, f"{command.name} has no option {word}"
        elif word not in ELLIPSES and hasattr(command, "commands"):
            assert word in command.commands, f"{command.name} has no command {word}"
            command = command.commands[word]


def test_the_docs_show_commands() -> None:
    """The tests above would pass on docs that they cannot read."""
    assert len(FENCED) > 30
    assert len(INLINE) > 10


@pytest.mark.parametrize(
    "words",
    [["serv"], ["run", "create"], ["status", "--runs", "math"], ["worker", "--simulate"], ["plan", "--rho", "x"]],
)
def test_commands_that_there_are_not_are_refused(words: list[str]) -> None:
    assert status_of(words) == 2


def test_shell_texts_are_split_as_a_shell_does() -> None:
    text = "A=1 one --x 'a b' \\\n  -y # said\n$ two > out 2>&1 | three && four &\n"
    assert list(shell_words(text)) == [["one", "--x", "a b", "-y"], ["two"], ["three"], ["four"]]

"""Splits what a user pastes into a terminal into the programs that it starts, with their words.

Nothing is executed: variables that the text itself sets are filled in, `$(which NAME)` is NAME, launchers of several
processes are taken off, and commands that only prepare the ground (mkdir, cd, export) are left out.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
WHICH = re.compile(r"\$\(\s*which\s+([^)\s]+)\s*\)|`\s*which\s+([^`\s]+)\s*`")
REDIRECTION = re.compile(r"(?<=\s)\d?>{1,2}\s*(?:&\d|\S+)")
SEPARATORS = {";", "&&", "||", "|", "&", "\n"}
PREPARATIONS = {"mkdir", "cd", "export", "echo", "pip", "conda", "source", "wget", "tar", "rm", "ls", "set"}
PREFIXES = {"sudo", "nohup", "time", "exec", "srun", "bash", "sh"}
LAUNCHERS = {"torch.distributed.launch", "torch.distributed.run", "torchrun"}
LAUNCHER_SWITCHES = {"--use_env", "--use-env", "--standalone", "--no_python", "--no-python"}


@dataclass(frozen=True)
class Invocation:
    """One program that a text starts.

    program: as it was named, such as fairseq-train, fairseq_cli.train or src/evaluate.py. processes: how many a
    launcher starts on all machines. gpus: how many CUDA_VISIBLE_DEVICES shows; None: it is not set.
    """

    program: str
    words: tuple[str, ...]
    processes: int = 1
    gpus: int | None = None

    @property
    def unset_variables(self) -> list[str]:
        """The names of the variables that the text uses and does not set."""
        found = (match[1] or match[2] for word in self.words for match in VARIABLE.finditer(word))
        return list(dict.fromkeys(found))

    @property
    def name(self) -> str:
        """The program without folders, endings and packages: train for fairseq_cli/train.py and fairseq_cli.train."""
        stem = PurePosixPath(self.program).name
        return stem.removesuffix(".py").removesuffix(".sh").rpartition(".")[2]


def split_commands(text: str) -> list[Invocation]:
    """Returns the programs of a text of one or several commands, in their order."""
    variables: dict[str, str] = {}
    found = []
    for words in _commands(text):
        expanded = [_expand(word, variables) for word in words]
        environment, rest = _take_assignments(expanded)
        if not rest:
            variables |= environment
        elif rest[0] not in PREPARATIONS:
            found.append(_invocation(rest, environment | variables))
    if not found:
        raise ValueError(
            "this starts no program that is needed here: paste a command line, such as 'fairseq-train data-bin/... "
            "--arch ...'"
        )
    return found


def _commands(text: str) -> list[list[str]]:
    """Splits a text into commands of words: quotes are taken off, comments and redirections left out."""
    text = WHICH.sub(lambda match: match[1] or match[2], text.replace("\\\r\n", " ").replace("\\\n", " "))
    commands: list[list[str]] = [[]]
    for line in text.splitlines():
        line = REDIRECTION.sub(" ", line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split, lexer.commenters = True, "#"
        try:
            words = list(lexer)
        except ValueError as error:
            raise ValueError(f"a quotation mark in this line has no other: {line.strip()[:80]}") from error
        for word in [*words, "\n"]:
            if word in SEPARATORS:
                commands.append([])
            else:
                commands[-1].append(word)
    return [words for words in commands if words]


def _expand(word: str, variables: dict[str, str]) -> str:
    return VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[0]), word)


def _take_assignments(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Splits NAME=VALUE words off the front."""
    environment: dict[str, str] = {}
    for place, word in enumerate(words):
        match = ASSIGNMENT.fullmatch(word)
        if match is None:
            return environment, list(words[place:])
        environment[match[1]] = match[2]
    return environment, []


def _invocation(words: Sequence[str], environment: dict[str, str]) -> Invocation:
    rest, processes = list(words), 1
    while rest:
        first = rest[0]
        if first in PREFIXES or re.fullmatch(r"(?:.*/)?python[\d.]*", first) or first == "-m" or first == "-u":
            rest = rest[1:]
        elif first in LAUNCHERS:
            processes, rest = _take_launcher(rest[1:])
        else:
            break
    if not rest:
        raise ValueError(f"{' '.join(words)[:80]}: this names no program")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = None if visible is None else len([device for device in visible.split(",") if device.strip()])
    return Invocation(rest[0].removeprefix("./"), tuple(rest[1:]), processes, gpus)


def _take_launcher(words: Sequence[str]) -> tuple[int, list[str]]:
    """Returns how many processes a launcher starts, and the words after its own options."""
    rest, counts = list(words), {"nproc_per_node": 1, "nnodes": 1}
    while rest and rest[0].startswith("-"):
        if rest[0] in LAUNCHER_SWITCHES or rest[0] == "-m":
            rest = rest[1:]
            continue
        option, equals, value = rest[0].partition("=")
        value, rest = (value, rest[1:]) if equals else (rest[1] if len(rest) > 1 else "", rest[2:])
        name = option.lstrip("-").replace("-", "_")
        if name in counts:
            if not value.isdigit():
                raise ValueError(
                    f"{option} {value}: a number of processes is needed, to count the batches of an update"
                )
            counts[name] = int(value)
    return counts["nproc_per_node"] * counts["nnodes"], rest

"""PTX text as a list of statements in basic blocks: what `ptx_interpreter` runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Address:
    """A memory operand ``[base + offset]``; the base is a register or a symbol."""

    base: str
    offset: int


Operand = str | Address | tuple[str, ...]
"""A register, symbol or immediate as it is written; a memory operand; or a vector ``{a, b}``."""


@dataclass(frozen=True)
class Statement:
    """One instruction: ``opcode`` split at its dots, operands with the destination first."""

    opcode: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: str | None = None
    """Predicate register of ``@%p`` or ``@!%p``, without the marks."""
    negated: bool = False
    line: int = 0
    text: str = ""


@dataclass
class Program:
    """One entry: its parameters, and blocks that are entered only at their start."""

    name: str
    parameters: dict[str, str]
    """Parameter name to its type, for example "u64", in the order of declaration."""
    shared_symbols: dict[str, int]
    """Name of an ``.extern .shared`` array to its alignment in bytes."""
    block_threads: int
    blocks: list[list[Statement]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """Label to the index of the block that it starts."""


_ENDS_BLOCK = ("bra", "bar", "ret", "exit")


def parse(ptx: str) -> Program:
    """Parse PTX that holds a single entry.

    Raises:
        ValueError: The text holds no entry, or a statement this reader does not know.
    """
    text = re.sub(r"//[^\n]*", "", ptx)
    entry = re.search(r"\.visible \.entry (\S+)\((.*?)\)\s*(.*?)\{(.*)\}", text, re.DOTALL)
    if entry is None:
        raise ValueError("no .visible .entry in this PTX")
    name, declared, directives, body = entry.groups()
    parameters = {
        words[-1]: words[1].removeprefix(".")
        for words in (line.split() for line in declared.split(","))
    }
    threads = re.search(r"\.reqntid (\d+)(?:, 1, 1)?\s", directives + " ")
    if threads is None:
        raise ValueError("the entry does not fix its number of threads (.reqntid)")
    shared = re.findall(r"\.extern \.shared \.align (\d+) \.b8 (\S+)\[\]", text)
    program = Program(
        name, parameters, {symbol: int(align) for align, symbol in shared}, int(threads.group(1))
    )
    _read_body(program, body, first_line=text[: entry.start(4)].count("\n") + 1)
    return program


def _read_body(program: Program, body: str, first_line: int) -> None:
    block: list[Statement] = []
    program.blocks.append(block)
    for match in re.finditer(r"\s*(?:(\$?\w+):|([^;:]+);)", body):
        label, text = match.groups()
        if label is not None:
            if block:
                block = []
                program.blocks.append(block)
            program.labels[label] = len(program.blocks) - 1
            continue
        if text.strip().startswith("."):
            continue  # .reg and .pragma: registers appear when they are first written
        line = first_line + body[: match.start(2)].count("\n")
        statement = _statement(" ".join(text.split()), line)
        block.append(statement)
        if statement.opcode[0] in _ENDS_BLOCK:
            block = []
            program.blocks.append(block)


def _statement(text: str, line: int) -> Statement:
    match = re.fullmatch(r"(?:@(!?)(%\w+) )?([\w.:]+)(?: (.*))?", text)
    if match is None:
        raise ValueError(f"line {line}: can not read {text!r}")
    negated, guard, opcode, operands = match.groups()
    return Statement(
        tuple(opcode.split(".")),
        tuple(_operands(operands or "")),
        guard,
        negated == "!",
        line,
        text,
    )


def _operands(text: str) -> list[Operand]:
    found: list[Operand] = []
    for vector, address, plain in re.findall(r"\{([^}]*)\}|\[([^\]]*)\]|([^,\s{}\[\]]+)", text):
        if vector:
            found.append(tuple(part.strip() for part in vector.split(",")))
        elif address:
            base, _, offset = address.partition("+")
            found.append(Address(base.strip(), int(offset) if offset else 0))
        else:
            found.append(plain)
    return found

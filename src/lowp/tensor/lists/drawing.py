"""Noise for two vectors at a time, in C++.

A draw is rounds of multiplications of 16-bit words (noise.py; `in_words` finds them). The words that belong to a vector of
32-bit numbers fill half a register. So what depends on keys and indices alone is taken out of a program, and printed once for
two vectors: `pair` is a vector of twice as many words. The rest of the program takes its half as an argument.

The key of a call is made there too (`key_text`): in Python its 200 operations take longer than a small call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowp.tensor.lists.preamble import SINGLES
from lowp.tensor.lists.tracing import WORD, Element, Program, Statement, Value, needed, trace, usual_and_general
from lowp.tensor.lists.vectors import TYPES, Printer, SinglePrinter
from lowp.tensor.noise import key_of_numbers

PREAMBLE = r"""
typedef uint16_t pair __attribute__((vector_size(4 * LANES)));
#if LANES == 16
#define PAIR_NUMBERS pair{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, \
                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31}
#elif LANES == 8
#define PAIR_NUMBERS pair{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#else
#define PAIR_NUMBERS pair{0, 1, 2, 3, 4, 5, 6, 7}
#endif
#if LANES == 16 && REGISTER == 64
INLINE pair upper_half(pair a, pair b) { return (pair)_mm512_mulhi_epu16((__m512i)a, (__m512i)b); }
INLINE u16 first_half(pair x) { return (u16)_mm512_castsi512_si256((__m512i)x); }
INLINE u16 second_half(pair x) { return (u16)_mm512_extracti64x4_epi64((__m512i)x, 1); }
#else
INLINE u16 first_half(pair x) { u16 half; memcpy(&half, &x, sizeof half); return half; }
INLINE u16 second_half(pair x) { u16 half; memcpy(&half, (const char*)&x + sizeof half, sizeof half); return half; }
#if LANES == 8 && REGISTER >= 32
INLINE pair upper_half(pair a, pair b) { return (pair)_mm256_mulhi_epu16((__m256i)a, (__m256i)b); }
#elif LANES == 4 && defined(__SSE2__)
INLINE pair upper_half(pair a, pair b) { return (pair)_mm_mulhi_epu16((__m128i)a, (__m128i)b); }
#else
INLINE pair upper_half(pair a, pair b) {
    for (int l = 0; l < 2 * LANES; l++) a[l] = (uint32_t)a[l] * b[l] >> 16; return a; }
#endif
#endif
"""


@dataclass(frozen=True)
class Drawing:
    """The part of a program that makes noise: the place of the number that is added to indices, the two words of this sum,
    what is computed of them, and the words that the rest of the program reads."""

    first: int
    low: Value
    high: Value
    statements: tuple[Statement, ...]
    words: tuple[Value, ...]
    keys: frozenset[str]  # names of the numbers that are words

    @property
    def parameters(self) -> str:
        """Of the function that works on one vector, behind the others."""
        return "".join(f", const u16 {v.name}" for v in self.words)

    def loop(self, body: str, begin: str, end: str, first: str, ahead: Sequence[str] = ()) -> list[str]:
        """`body(e, count, words...)` from `begin` to `end`; `first` is the text of the number that is added to indices.
        `ahead` are lines that fetch what the body reads some pairs later."""

        def halves(which: str) -> str:
            return "".join(f", {which}_half({v.name})" for v in self.words)

        own = "".join(f", of_{v.name}[h]" for v in self.words)
        printer = _PairPrinter()
        statements = [f"        const pair {s.result.name} = {printer.expression(s)};" for s in self.statements]
        return [
            *printer.declared(),
            f"const uint32_t first_index = (uint32_t)({first});",
            "pair both = splat<pair>((uint16_t)(2 * LANES)); KEEP(both);",
            f"for (long e = {begin}; e < {end};) {{",
            "    const uint32_t at = (uint32_t)e + first_index;",
            "    pair low_words = splat<pair>((uint16_t)at) + PAIR_NUMBERS;",
            # where the sum of the lower words has wrapped around: a comparison gives -1
            f"    const pair {self.high.name} = splat<pair>((uint16_t)(at >> 16)) - (pair)(low_words < PAIR_NUMBERS);",
            # The upper words are the same until the lower ones wrap around, if they do that between two pairs.
            "    const long same = at % (2 * LANES) == 0 ? 65536 - (long)(uint16_t)at : 2 * LANES;",
            f"    const long until = e + same < {end} ? e + same : {end};",
            "    for (; e < until; e += 2 * LANES) {",
            *("        " + line for line in ahead),
            f"        const pair {self.low.name} = low_words;",
            "        low_words += both;",
            *statements,
            f"        if (__builtin_expect(e + 2 * LANES <= {end}, 1)) {{",
            f"            {body}(e, LANES{halves('first')}); {body}(e + LANES, LANES{halves('second')});",
            "        } else {",
            *(f"            const u16 of_{v.name}[] = {{first_half({v.name}), second_half({v.name})}};" for v in self.words),
            f"            for (long h = 0; e + h * LANES < {end}; h++) {{",
            f"                const long left = {end} - (e + h * LANES);",
            f"                {body}(e + h * LANES, left < LANES ? left : LANES{own});",
            "            }",
            "        }",
            "    }",
            "}",
        ]


class _PairPrinter(Printer):
    """Constants are made before the loop."""

    def literal(self, constant: object, dtype: torch.dtype, shift: bool = False) -> str:
        assert dtype == WORD
        assert isinstance(constant, int)
        if shift:
            return f"splat<pair>((uint16_t){constant & 0xFFFF})"
        return f"word{self.constants.setdefault(('pair', str(constant & 0xFFFF)), len(self.constants))}"

    def declared(self) -> list[str]:
        return [
            f"pair word{place} = splat<pair>((uint16_t){text}); KEEP(word{place});"
            for (_, text), place in self.constants.items()
        ]


def taken_apart(program: Program) -> tuple[Drawing | None, Program]:
    """What makes noise, and the rest, which reads the words of it. None where a program (of `in_words`) draws nothing."""
    found = _beginning(program)
    if found is None:
        return None, program
    first, low, high = found
    keys = {v.name for v in program.numbers.values() if v.dtype == WORD}
    ours, statements = {low.name, high.name}, []
    always = _of_the_usual_way(program, keys)
    for s in program.statements:
        values = [a for a in s.arguments if isinstance(a, Value)]
        if s.result.name not in always:
            continue
        if s.result.dtype == WORD and s.operand == WORD and all(v.name in ours or v.name in keys for v in values):
            ours.add(s.result.name)
            statements.append(s)
    rest = [s for s in program.statements if s.result.name not in ours]
    read = {a.name: a for s in rest for a in s.arguments if isinstance(a, Value)} | {v.name: v for v in program.results}
    if any(name in read for name in keys) or any(read[name].dtype != WORD for name in ours & read.keys()):
        return None, program
    words = tuple(v for name, v in read.items() if name in ours)
    drawing = Drawing(first, low, high, tuple(statements), words, frozenset(keys))
    left = Program(program.elements, program.numbers, program.scalars, needed(rest, program.results), program.results)
    return drawing, left


def _of_the_usual_way(program: Program, keys: set[str]) -> set[str]:
    """The names that are needed where every shortcut is taken. Words that only long ways need are made there, if that takes no
    key."""
    usual = {s.result.name for s in usual_and_general(program)[0].statements}
    others = [s for s in program.statements if s.result.name not in usual]
    by_keys = any(isinstance(a, Value) and a.name in keys for s in others for a in s.arguments)
    return usual | {s.result.name for s in others} if by_keys else usual


def _beginning(program: Program) -> tuple[int, Value, Value] | None:
    """Which number is added to indices, and the lower and upper word of the sum."""
    made_by = {s.result.name: s for s in program.statements}
    places = {v.name: place for place, v in program.numbers.items()}

    def made(value: object, operation: str) -> Statement | None:
        s = made_by.get(value.name) if isinstance(value, Value) else None
        return s if s is not None and s.operation == operation else None

    def sum_of_index(value: object) -> int | None:
        s = made(value, "add")
        if s is None or made(s.arguments[0], "index") is None or not isinstance(s.arguments[1], Value):
            return None
        return places.get(s.arguments[1].name)

    low: dict[int, Value] = {}
    high: dict[int, Value] = {}
    for s in program.statements:
        if s.operation != "convert" or s.result.dtype != WORD:
            continue
        place = sum_of_index(s.arguments[0])
        if place is not None:
            low[place] = s.result
            continue
        shifted = made(s.arguments[0], "shr")
        if shifted is not None and shifted.arguments[1] == 16 and (place := sum_of_index(shifted.arguments[0])) is not None:
            high[place] = s.result
    both = [place for place in low if place in high]
    return (both[0], low[both[0]], high[both[0]]) if len(low) == len(high) == len(both) == 1 else None


def typed_numbers(program: Program, drawn: Drawing | None) -> list[tuple[int, Value, str]]:
    """The numbers that a program reads: place, value and type in C++. Keys of a drawing are pairs."""
    return [
        (place, v, "pair" if drawn is not None and v.name in drawn.keys else TYPES[v.dtype])
        for place, v in program.numbers.items()
    ]


def key_text() -> str:
    """`noise.key_of_numbers` in C++: `single::make_key` takes the five numbers, and the address of six int32 to write to."""

    def function(*arguments: Any) -> list[torch.Tensor]:
        return key_of_numbers(*arguments[:5])

    program, printer = trace(function, [Element(torch.int64)] * 5, 0, 0, [], torch.device("cpu")), SinglePrinter()
    lines = [
        SINGLES[0],
        "static void make_key(" + ", ".join(f"i64 {v.name}" for v in program.elements) + ", int32_t* key) {",
        *(f"    const {TYPES[s.result.dtype]} {s.result.name} = {printer.expression(s)};" for s in program.statements),
        *(f"    key[{i}] = {v.name};" for i, v in enumerate(program.results)),
        "}",
        SINGLES[1],
    ]
    return "\n".join(lines)
